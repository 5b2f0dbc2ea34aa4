import java.io.StringReader;
import java.io.StringWriter;
import java.sql.*;
import java.util.Arrays;
import java.util.Properties;
import org.postgresql.PGConnection;
import org.postgresql.copy.CopyManager;
import org.postgresql.largeobject.LargeObject;
import org.postgresql.largeobject.LargeObjectManager;

/** What a Java application does with pgjdbc; a line for each: its name, a tab, passed or failed, a tab, why. */
public class Day {
    interface Work { void run(Connection c) throws Exception; }

    static String url, user, password;

    static Connection connect(String... settings) throws SQLException {
        Properties p = new Properties();
        p.setProperty("user", user);
        p.setProperty("password", password);
        for (int i = 0; i < settings.length; i += 2) p.setProperty(settings[i], settings[i + 1]);
        return DriverManager.getConnection(url, p);
    }

    static void test(String name, Work work, String... settings) {
        try (Connection c = connect(settings)) {
            work.run(c);
            System.out.println(name + "\tpassed\t");
        } catch (Throwable t) {
            System.out.println(name + "\tfailed\t" + t.toString().replace('\n', ' '));
        }
    }

    static void same(Object expected, Object found) {
        if (!expected.equals(found)) throw new AssertionError("expected " + expected + ", found " + found);
    }

    static Object one(Connection c, String sql) throws SQLException {
        try (Statement s = c.createStatement(); ResultSet r = s.executeQuery(sql)) {
            r.next();
            return r.getObject(1);
        }
    }

    static void run(Connection c, String sql) throws SQLException {
        try (Statement s = c.createStatement()) { s.execute(sql); }
    }

    static void reads(Connection c) throws Exception {
        try (PreparedStatement s = c.prepareStatement("SELECT i, i * 2 FROM generate_series(1, ?) i")) {
            // From the fifth time on it is prepared at the server, and binary.
            for (int n = 1; n <= 12; n++) {
                s.setInt(1, n);
                int sum = 0;
                try (ResultSet r = s.executeQuery()) { while (r.next()) sum += r.getInt(2); }
                same(n * (n + 1), sum);
            }
        }
    }

    static void fetches(Connection c) throws Exception {
        c.setAutoCommit(false);
        try (Statement s = c.createStatement()) {
            s.setFetchSize(100);
            int count = 0;
            try (ResultSet r = s.executeQuery("SELECT * FROM generate_series(1, 2345)")) { while (r.next()) count++; }
            same(2345, count);
        }
        c.commit();
    }

    static void batches(Connection c) throws Exception {
        run(c, "CREATE TEMP TABLE b (id int PRIMARY KEY, t text)");
        try (PreparedStatement s = c.prepareStatement("INSERT INTO b VALUES (?, ?)", Statement.RETURN_GENERATED_KEYS)) {
            for (int i = 0; i < 500; i++) {
                s.setInt(1, i);
                s.setString(2, "text " + i);
                s.addBatch();
            }
            same(500, s.executeBatch().length);
        }
        same(500L, one(c, "SELECT count(*) FROM b"));
        try (PreparedStatement s = c.prepareStatement("INSERT INTO b VALUES (?, 'x')")) {
            for (int i : new int[] {600, 3, 601}) {
                s.setInt(1, i);
                s.addBatch();
            }
            s.executeBatch();
            throw new AssertionError("a key was taken twice");
        } catch (BatchUpdateException e) {
            same("23505", e.getSQLState());
        }
    }

    static void saves(Connection c) throws Exception {
        c.setAutoCommit(false);
        run(c, "CREATE TEMP TABLE s (id int PRIMARY KEY)");
        run(c, "INSERT INTO s VALUES (1)");
        try { run(c, "INSERT INTO s VALUES (1)"); } catch (SQLException e) { same("23505", e.getSQLState()); }
        run(c, "INSERT INTO s VALUES (2)");
        c.commit();
        same(2L, one(c, "SELECT count(*) FROM s"));
    }

    static void savepoints(Connection c) throws Exception {
        c.setAutoCommit(false);
        run(c, "CREATE TEMP TABLE p (id int)");
        Savepoint point = c.setSavepoint("one");
        run(c, "INSERT INTO p VALUES (1)");
        c.rollback(point);
        c.releaseSavepoint(point);
        c.commit();
        same(0L, one(c, "SELECT count(*) FROM p"));
    }

    static void copies(Connection c) throws Exception {
        run(c, "CREATE TEMP TABLE k (id int, t text)");
        CopyManager copy = c.unwrap(PGConnection.class).getCopyAPI();
        StringBuilder rows = new StringBuilder();
        for (int i = 0; i < 5000; i++) rows.append(i).append("\trow\n");
        same(5000L, copy.copyIn("COPY k FROM STDIN", new StringReader(rows.toString())));
        StringWriter out = new StringWriter();
        same(5000L, copy.copyOut("COPY k TO STDOUT", out));
        same(rows.toString(), out.toString());
        try {
            copy.copyIn("COPY k FROM STDIN", new StringReader("not a number\n"));
            throw new AssertionError("text was taken for a number");
        } catch (SQLException e) {
            same("22P02", e.getSQLState());
        }
    }

    static void cancels(Connection c) throws Exception {
        try (Statement s = c.createStatement()) {
            s.setQueryTimeout(1);
            s.execute("SELECT pg_sleep(30)");
            throw new AssertionError("it was not cancelled");
        } catch (SQLException e) {
            same("57014", e.getSQLState());
        }
        same(1, one(c, "SELECT 1"));
    }

    static void listens(Connection c) throws Exception {
        run(c, "LISTEN day");
        try (Connection other = connect()) { run(other, "NOTIFY day, 'hello'"); }
        var told = c.unwrap(PGConnection.class).getNotifications(5000);
        same("hello", told[0].getParameter());
    }

    static void largeObjects(Connection c) throws Exception {
        c.setAutoCommit(false);
        LargeObjectManager all = c.unwrap(PGConnection.class).getLargeObjectAPI();
        long oid = all.createLO(LargeObjectManager.READWRITE);
        byte[] bytes = new byte[100_000];
        Arrays.fill(bytes, (byte) 7);
        try (LargeObject object = all.open(oid)) { object.write(bytes); }
        try (LargeObject object = all.open(oid)) { same(true, Arrays.equals(bytes, object.read(200_000))); }
        all.unlink(oid);
        c.commit();
    }

    static void types(Connection c) throws Exception {
        try (PreparedStatement s = c.prepareStatement("SELECT ?::int8, ?::numeric, ?::bytea, ?::timestamptz, ?::text[], ?::bool")) {
            Timestamp now = Timestamp.valueOf("2024-05-05 12:34:56.789");
            for (int n = 0; n < 8; n++) {
                s.setLong(1, Long.MAX_VALUE);
                s.setBigDecimal(2, new java.math.BigDecimal("12345.678"));
                s.setBytes(3, new byte[] {0, 1, (byte) 255});
                s.setTimestamp(4, now);
                s.setArray(5, c.createArrayOf("text", new Object[] {"a", null, "naïve"}));
                s.setNull(6, Types.BOOLEAN);
                try (ResultSet r = s.executeQuery()) {
                    r.next();
                    same(Long.MAX_VALUE, r.getLong(1));
                    same("12345.678", r.getBigDecimal(2).toString());
                    same(3, r.getBytes(3).length);
                    same(now, r.getTimestamp(4));
                    same("naïve", ((Object[]) r.getArray(5).getArray())[2]);
                    same(true, r.getObject(6) == null);
                }
            }
        }
    }

    static void metadata(Connection c) throws Exception {
        DatabaseMetaData m = c.getMetaData();
        run(c, "CREATE TABLE day_of_java (id int PRIMARY KEY, t text)");
        try (ResultSet r = m.getColumns(null, "public", "day_of_java", null)) {
            r.next();
            same("id", r.getString("COLUMN_NAME"));
        }
        try (ResultSet r = m.getPrimaryKeys(null, "public", "day_of_java")) { same(true, r.next()); }
        run(c, "DROP TABLE day_of_java");
        try (PreparedStatement s = c.prepareStatement("SELECT ?::int AS a, 'x'::text AS b")) {
            same(2, s.getMetaData().getColumnCount());
            same("int4", s.getParameterMetaData().getParameterTypeName(1));
        }
    }

    static void errors(Connection c) throws Exception {
        try { run(c, "SELECT nothing"); } catch (SQLException e) { same("42703", e.getSQLState()); }
        try { run(c, "SELEC 1"); } catch (SQLException e) { same("42601", e.getSQLState()); }
        same(1, one(c, "SELECT 1"));
        run(c, "DO $$ BEGIN RAISE WARNING 'careful'; END $$");
    }

    static void several(Connection c) throws Exception {
        try (Statement s = c.createStatement()) {
            s.execute("SELECT 1; SELECT 2; SELECT 3");
            int results = 1;
            while (s.getMoreResults()) results++;
            same(3, results);
        }
    }

    static void readOnly(Connection c) throws Exception {
        c.setReadOnly(true);
        c.setTransactionIsolation(Connection.TRANSACTION_SERIALIZABLE);
        c.setAutoCommit(false);
        try {
            run(c, "CREATE TABLE never (id int)");
            throw new AssertionError("it was written to");
        } catch (SQLException e) {
            same("25006", e.getSQLState());
        }
        c.rollback();
    }

    static void calls(Connection c) throws Exception {
        run(c, "CREATE FUNCTION pg_temp.twice(int) RETURNS int LANGUAGE sql AS 'SELECT 2 * $1'");
        try (CallableStatement s = c.prepareCall("{? = call pg_temp.twice(?)}")) {
            s.registerOutParameter(1, Types.INTEGER);
            s.setInt(2, 21);
            s.execute();
            same(42, s.getInt(1));
        }
    }

    public static void main(String[] args) throws Exception {
        url = args[0];
        user = args[1];
        password = args[2];
        test("reads", Day::reads);
        test("reads, simple protocol", Day::reads, "preferQueryMode", "simple");
        test("reads, never prepared", Day::reads, "prepareThreshold", "0");
        test("reads, binary at once", Day::reads, "prepareThreshold", "-1");
        test("fetch size", Day::fetches);
        test("adaptive fetch", Day::fetches, "adaptiveFetch", "true", "defaultRowFetchSize", "10", "maxResultBuffer", "1M");
        test("batches", Day::batches);
        test("batches, rewritten", Day::batches, "reWriteBatchedInserts", "true");
        test("autosave", Day::saves, "autosave", "always");
        test("savepoints", Day::savepoints);
        test("COPY both ways", Day::copies);
        test("cancel", Day::cancels);
        test("LISTEN", Day::listens);
        test("large objects", Day::largeObjects);
        test("types", Day::types);
        test("metadata", Day::metadata);
        test("errors", Day::errors);
        test("several results", Day::several);
        test("read only", Day::readOnly);
        test("calls", Day::calls);
    }
}
