//! Aborts with memory of which other memory has pushed out a part: `dumped-memory HOW`.
//!
//! HOW says what is done about the memory's place in a core file before: `nothing`, or MADV_DODUMP
//! by `libc` or by `syscall`. Prints a line for each part of its memory: name, start and length in
//! bytes, and whether the kernel leaves that out of core files. Every word of it is [`WORD`].

use hecaton_e2e::{Checked, fork_and, wait_for};
use std::fs;
use std::io::Error;

const WORD: u64 = 0x5ca1_ab1e_0ddb_a115;

const LEN: usize = 24 << 20;

/// Pages of other memory: more than is local.
const OTHERS: usize = 10_000;

const ON_STACK: usize = 16 << 10;

fn main() {
    let how = std::env::args().nth(1).expect("HOW is missing");
    let on_stack = [WORD; ON_STACK / 8];
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice, which stays for good.
    let memory = unsafe {
        let at = libc::mmap(std::ptr::null_mut(), LEN, protection, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED, "{}", Error::last_os_error());
        std::slice::from_raw_parts_mut(at.cast::<u64>(), LEN / 8)
    };
    memory.fill(WORD);
    let mut others = Checked::new(1, OTHERS);
    (0..OTHERS).for_each(|page| others.write(page));
    // A fork takes marks off the memory for a moment.
    wait_for(fork_and(|| {}));
    let at = memory.as_mut_ptr();
    // SAFETY: the memory stays as it is.
    let advised = unsafe {
        match how.as_str() {
            "nothing" => 0,
            "libc" => libc::madvise(at.cast(), LEN, libc::MADV_DODUMP).into(),
            "syscall" => libc::syscall(libc::SYS_madvise, at, LEN, libc::MADV_DODUMP),
            _ => panic!("HOW is none of nothing, libc, syscall: {how}"),
        }
    };
    assert_eq!(advised, 0, "{}", Error::last_os_error());
    tell("memory", at.addr(), LEN);
    tell("stack", on_stack.as_ptr().addr(), ON_STACK);
    std::hint::black_box(&on_stack);
    std::process::abort();
}

fn tell(name: &str, start: usize, len: usize) {
    let left_out = if is_left_out(start) { "out" } else { "in" };
    println!("{name} {start} {len} {left_out}");
}

/// Whether the mapping at this address has the kernel's flag `dd`.
fn is_left_out(address: usize) -> bool {
    let smaps = fs::read_to_string("/proc/self/smaps").expect("the kernel has smaps");
    let mut is_in = false;
    for line in smaps.lines() {
        let bounds = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let number = |digits| usize::from_str_radix(digits, 16).ok();
        if let Some((start, end)) = bounds.and_then(|(a, b)| number(a).zip(number(b))) {
            is_in = (start..end).contains(&address);
        }
        if let (true, Some(flags)) = (is_in, line.strip_prefix("VmFlags:")) {
            return flags.split_whitespace().any(|flag| flag == "dd");
        }
    }
    panic!("no mapping at {address:x}");
}
