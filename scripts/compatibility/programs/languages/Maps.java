import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** Fills a HashMap and lists of arrays, drops half of it, and prints what is left. */
class Maps {
    public static void main(String[] arguments) {
        int count = 500_000;
        Map<String, long[]> map = new HashMap<>();
        for (int i = 0; i < count; i++) {
            map.put("key-" + (i * 7919L) % count, new long[] {i, i * 2L, i * 3L});
        }
        long sum = 0;
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < count; i += 3) {
                sum += map.get("key-" + i)[round];
            }
        }
        for (int i = 0; i < count; i += 2) {
            map.remove("key-" + i);
        }
        List<byte[]> blocks = new ArrayList<>();
        for (int round = 0; round < 10; round++) {
            blocks.clear();
            for (int i = 0; i < 1000; i++) {
                byte[] block = new byte[32_000];
                block[i] = (byte) i;
                blocks.add(block);
            }
        }
        for (int i = 0; i < 1000; i++) {
            sum += blocks.get(i)[i];
        }
        System.out.println(sum + " " + map.size() + " " + map.values().stream().mapToLong(v -> v[2]).sum());
    }
}
