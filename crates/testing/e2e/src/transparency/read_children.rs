//! Reads all memory of a child as soon as it is forked, as a debugger might.

use hecaton_e2e::{fork_and, wait_for};
use std::{
    io::{Error, Read as _, Write as _},
    os::unix::net::UnixStream,
};

const PAGE: usize = 4096;

/// 47 MiB.
const PAGES: usize = 12_000;

/// Pages of one read.
const AT_ONCE: usize = 256;

const FORKS: usize = 6;

fn main() {
    let mut memory = vec![0u64; PAGES * PAGE / 8];
    let number = |page: usize, round: usize| (1 + page + round * PAGES) as u64;
    for round in 0..FORKS {
        for (page, words) in memory.chunks_exact_mut(PAGE / 8).enumerate() {
            words[0] = number(page, round);
        }
        let (mut ours, mut theirs) = UnixStream::pair().expect("a socket pair");
        let child = fork_and(|| {
            theirs.read_exact(&mut [0]).expect("the parent is there");
            for (page, words) in memory.chunks_exact(PAGE / 8).enumerate() {
                assert_eq!(words[0], number(page, round), "page {page} in the child");
            }
        });
        let mut buffer = vec![0u64; AT_ONCE * PAGE / 8];
        for first in (0..PAGES / AT_ONCE).map(|part| part * AT_ONCE) {
            let len = AT_ONCE * PAGE;
            let to = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: len };
            let at = memory.as_mut_ptr().wrapping_add(first * PAGE / 8);
            let from = libc::iovec { iov_base: at.cast(), iov_len: len };
            // SAFETY: the buffer is this function's; the other memory is the child's.
            let read =
                unsafe { libc::process_vm_readv(child, &raw const to, 1, &raw const from, 1, 0) };
            assert_eq!(read, len as isize, "{}", Error::last_os_error());
            for (page, words) in buffer.chunks_exact(PAGE / 8).enumerate() {
                assert_eq!(words[0], number(first + page, round), "page {page} from outside");
            }
        }
        ours.write_all(&[0]).expect("the child is there");
        wait_for(child);
    }
    println!("verified");
}
