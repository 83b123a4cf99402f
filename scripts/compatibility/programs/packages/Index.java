import org.apache.lucene.analysis.standard.StandardAnalyzer;
import org.apache.lucene.document.Document;
import org.apache.lucene.document.Field;
import org.apache.lucene.document.TextField;
import org.apache.lucene.index.DirectoryReader;
import org.apache.lucene.index.IndexWriter;
import org.apache.lucene.index.IndexWriterConfig;
import org.apache.lucene.index.Term;
import org.apache.lucene.search.IndexSearcher;
import org.apache.lucene.search.TermQuery;
import org.apache.lucene.store.ByteBuffersDirectory;

/** Indexes 60,000 texts with Lucene in memory, and counts matches. */
class Index {
    public static void main(String[] arguments) throws Exception {
        try (ByteBuffersDirectory directory = new ByteBuffersDirectory()) {
            try (IndexWriter writer = new IndexWriter(directory, new IndexWriterConfig(new StandardAnalyzer()))) {
                for (int i = 0; i < 60_000; i++) {
                    StringBuilder text = new StringBuilder();
                    for (int word = 0; word < 40; word++) {
                        text.append(" w").append((long) i * 31 * (word + 7) % 20_011);
                    }
                    Document document = new Document();
                    document.add(new TextField("text", text.toString(), Field.Store.YES));
                    writer.addDocument(document);
                }
            }
            try (DirectoryReader reader = DirectoryReader.open(directory)) {
                IndexSearcher searcher = new IndexSearcher(reader);
                long sum = 0;
                for (int word = 0; word < 2000; word++) {
                    sum += searcher.count(new TermQuery(new Term("text", "w" + word)));
                }
                System.out.println(reader.numDocs() + " " + sum);
            }
        }
    }
}
