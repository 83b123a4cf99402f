//! Turns what `valgrind --tool=lackey --trace-mem=yes` prints (on standard input) into a page
//! trace: `record_trace FILE [MAX_ENTRIES]`. See traces/record.sh.

use anyhow::{Context, bail};
use hecaton_policy::replay::trace::{Recorder, encode};
use std::io::BufRead;

/// Valgrind puts the stack of the program here, and a pager leaves stacks alone.
const STACK_PAGES: std::ops::Range<u64> = 0x1ff_0000..0x200_0000;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let Some(file) = args.next() else { bail!("usage: record_trace FILE [MAX_ENTRIES]") };
    let max = args.next().map_or(Ok(usize::MAX), |arg| arg.parse().context(arg))?;

    let mut recorder = Recorder::default();
    let mut input = std::io::stdin().lock();
    let mut line = Vec::new();
    while recorder.references().len() < max {
        line.clear();
        if input.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        // " L 1ffefff,8": load, store or modify; instruction fetches begin in the first column.
        let (write, address) = match line.as_slice() {
            [b' ', b'L', b' ', address @ ..] => (false, address),
            [b' ', b'S' | b'M', b' ', address @ ..] => (true, address),
            _ => continue,
        };
        let digits = address.iter().map_while(|&digit| (digit as char).to_digit(16));
        let page = digits.fold(0u64, |value, digit| value << 4 | u64::from(digit)) >> 12;
        if !STACK_PAGES.contains(&page) {
            recorder.record(page, write);
        }
    }
    let references = recorder.references();
    let bytes = encode(references);
    let mut pages: Vec<u64> = references.iter().map(|r| r.page).collect();
    pages.sort_unstable();
    pages.dedup();
    eprintln!("{file}: {} entries, {} pages, {} bytes", references.len(), pages.len(), bytes.len());
    std::fs::write(&file, bytes).context(file)
}
