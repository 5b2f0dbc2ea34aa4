DROP TABLE sqlguard.observation;
