//! Reads and writes its own memory through `/proc/self/mem`, most of it pushed out by the rest.

use hecaton_e2e::Random;
use std::{fs::OpenOptions, os::unix::fs::FileExt};

const PAGE: usize = 4096;

/// 47 MiB.
const PAGES: usize = 12_000;

/// Pages of one transfer, at most.
const AT_ONCE: usize = 40;

const TRANSFERS: usize = 2_000;

fn main() {
    let mut memory = vec![0u8; PAGES * PAGE];
    let mut expected = vec![0u8; PAGES];
    for (page, bytes) in memory.chunks_exact_mut(PAGE).enumerate() {
        bytes.fill(page as u8);
        expected[page] = page as u8;
    }
    let file =
        OpenOptions::new().read(true).write(true).open("/proc/self/mem").expect("it is there");
    let start = memory.as_ptr() as u64;
    let mut random = Random(1);
    let mut buffer = vec![0u8; AT_ONCE * PAGE];
    for transfer in 0..TRANSFERS {
        let pages = 1 + random.below(AT_ONCE);
        let first = random.below(PAGES - pages);
        let (at, len) = (start + (first * PAGE) as u64, pages * PAGE);
        if transfer % 3 == 0 {
            buffer[..len].fill(transfer as u8);
            assert_eq!(file.write_at(&buffer[..len], at).expect("it can be written"), len);
            expected[first..first + pages].fill(transfer as u8);
        } else {
            assert_eq!(file.read_at(&mut buffer[..len], at).expect("it can be read"), len);
            for (page, bytes) in buffer[..len].chunks_exact(PAGE).enumerate() {
                let value = expected[first + page];
                assert!(bytes.iter().all(|&byte| byte == value), "page {}", first + page);
            }
        }
    }
    // The compiler must not know what is there.
    let memory = std::hint::black_box(memory);
    for (page, bytes) in memory.chunks_exact(PAGE).enumerate() {
        assert!(bytes.iter().all(|&byte| byte == expected[page]), "page {page}");
    }
    let unmapped = file.read_at(&mut buffer, 4096).expect_err("nothing is mapped there");
    println!("verified; {unmapped}");
}
