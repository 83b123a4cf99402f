import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.Statement;

/** Fills a table of a database in memory by JDBC, and asks it: H2, HSQLDB or DuckDB, by URL. */
class Databases {
    public static void main(String[] arguments) throws Exception {
        int count = Integer.parseInt(arguments[1]);
        try (Connection connection = DriverManager.getConnection(arguments[0]);
                Statement statement = connection.createStatement()) {
            statement.execute("create table t (id int primary key, k int, s varchar(100))");
            connection.setAutoCommit(false);
            try (PreparedStatement insert = connection.prepareStatement("insert into t values (?, ?, ?)")) {
                for (int i = 0; i < count; i++) {
                    insert.setInt(1, i);
                    insert.setInt(2, (int) (i * 7919L % 5000));
                    insert.setString(3, "text " + i + " of a row that is somewhat long");
                    insert.addBatch();
                    if (i % 1000 == 999) {
                        insert.executeBatch();
                    }
                }
            }
            connection.commit();
            String query = "select k, count(*), max(s) from t group by k order by 2 desc, 1 limit 5";
            try (ResultSet rows = statement.executeQuery(query)) {
                while (rows.next()) {
                    System.out.println(rows.getInt(1) + " " + rows.getLong(2) + " " + rows.getString(3));
                }
            }
        }
    }
}
