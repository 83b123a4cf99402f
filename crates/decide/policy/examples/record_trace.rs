//! Turns what `valgrind --tool=lackey --trace-mem=yes --trace-sched=yes` prints (on standard input)
//! into a page trace: `record_trace FILE [MAX_ENTRIES [FILTER_PAGES [SKIP]]]`. The first SKIP
//! references that pass the filter are left out. See traces/record.sh.

use anyhow::{Context, bail};
use hecaton_policy::replay::trace::{FILTER_PAGES, FIRST_THREAD, Recorder, Reference, encode};
use std::io::BufRead;

/// Valgrind puts the stack of the program here, and a pager leaves stacks alone.
const STACK_PAGES: std::ops::Range<u64> = 0x1ff_0000..0x200_0000;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let Some(file) = args.next() else {
        bail!("usage: record_trace FILE [MAX_ENTRIES [FILTER_PAGES [SKIP]]]")
    };
    let mut number = |default| args.next().map_or(Ok(default), |arg| arg.parse().context(arg));
    let max = number(usize::MAX)?;
    let filter_pages = number(FILTER_PAGES)?;
    let skip = number(0)?;

    let mut recorder = Recorder::new(filter_pages);
    let mut thread = FIRST_THREAD;
    let mut input = std::io::stdin().lock();
    let mut line = Vec::new();
    while recorder.references().len() < skip.saturating_add(max) {
        line.clear();
        if input.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        // " L 1ffefff,8": load, store or modify; instruction fetches begin in the first column.
        let (write, address) = match line.as_slice() {
            [b' ', b'L', b' ', address @ ..] => (false, address),
            [b' ', b'S' | b'M', b' ', address @ ..] => (true, address),
            _ => {
                thread = thread_that_runs(&line).unwrap_or(thread);
                continue;
            }
        };
        let digits = address.iter().map_while(|&digit| (digit as char).to_digit(16));
        let page = digits.fold(0u64, |value, digit| value << 4 | u64::from(digit)) >> 12;
        if !STACK_PAGES.contains(&page) {
            recorder.record(Reference { page, write, thread });
        }
    }
    let references = recorder.references().get(skip..).unwrap_or_default();
    let bytes = encode(references);
    let mut pages: Vec<u64> = references.iter().map(|r| r.page).collect();
    pages.sort_unstable();
    pages.dedup();
    let mut threads: Vec<u32> = references.iter().map(|r| r.thread).collect();
    threads.sort_unstable();
    threads.dedup();
    eprintln!(
        "{file}: {} entries, {} pages, {} threads, {} bytes",
        references.len(),
        pages.len(),
        threads.len(),
        bytes.len()
    );
    std::fs::write(&file, bytes).context(file)
}

/// The thread that valgrind lets run from here on: "--123--   SCHED[2]:  acquired lock (...)".
fn thread_that_runs(line: &[u8]) -> Option<u32> {
    let line = std::str::from_utf8(line.strip_prefix(b"--")?).ok()?;
    let (thread, what) = line.split_once("SCHED[")?.1.split_once("]:")?;
    what.trim_start().starts_with("acquired lock").then(|| thread.parse().ok())?
}
