-- What the observing proxy saw: per login and statement shape, what the guard would have said, and how often.
-- Counts, not history: it holds no value of any statement, so it may be kept and handed round.
CREATE TABLE sqlguard.observation (
    agent text NOT NULL,
    role text NOT NULL,
    policy text NOT NULL,
    policy_version integer NOT NULL,
    fingerprint text NOT NULL,
    verdict text NOT NULL CHECK (verdict IN ('allow', 'rewrite', 'approve', 'refuse', 'unknown')),
    kind text NOT NULL,
    rules text[] NOT NULL,
    message text,
    hint text,
    tables text[] NOT NULL,
    -- The first text of this shape, without its values.
    sample text NOT NULL,
    -- The first text of the shape as the guard would have sent it, without its values; null: as it came.
    executed text,
    count bigint NOT NULL CHECK (count > 0),
    first_at timestamptz NOT NULL,
    last_at timestamptz NOT NULL,
    PRIMARY KEY (agent, role, policy, policy_version, fingerprint, verdict)
);
COMMENT ON TABLE sqlguard.observation IS 'what sqlguard serve --observe would have done, per login and statement shape';
