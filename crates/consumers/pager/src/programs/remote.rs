//! Reads a program's memory.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Reads from the memory of process `pid` into this one's. True if all was read.
///
/// The process is named by any of its threads: when the first one has ended (`pthread_exit` in
/// `main`) while others go on, the kernel finds no memory behind its number any more.
///
/// # Safety
/// `to` must be memory that nobody else uses meanwhile.
pub(crate) unsafe fn read(pid: i32, to: &[libc::iovec], from: &[libc::iovec]) -> bool {
    let wanted: usize = to.iter().map(|part| part.iov_len).sum();
    let read = |thread: i32| {
        // SAFETY: the caller vouches for `to`; `from` is another process's memory.
        let read = unsafe {
            let (to_len, from_len) = (to.len() as u64, from.len() as u64);
            libc::process_vm_readv(thread, to.as_ptr(), to_len, from.as_ptr(), from_len, 0)
        };
        read == wanted as isize
    };
    read(pid) || threads(pid).into_iter().any(read)
}

/// A process's memory as a file, which shows also what the process itself may not read.
pub(crate) struct Memory(Option<File>);

impl Memory {
    /// Reads nothing if it cannot be opened.
    pub(crate) fn of(pid: i32) -> Memory {
        let open = |thread: i32| File::open(format!("/proc/{thread}/mem")).ok();
        Memory(open(pid).or_else(|| threads(pid).into_iter().find_map(open)))
    }

    /// Fills `to` from `address`. False if that is not possible without a fault.
    pub(crate) fn read(&mut self, address: u64, to: &mut [u8]) -> bool {
        self.0.as_ref().is_some_and(|file| file.read_exact_at(to, address).is_ok())
    }
}

/// Gives the process pages of its own in the place of those that a fork shares or has shared.
///
/// The kernel pins a page for `process_vm_readv`, and a pinned page belongs to one process alone
/// (`gup_must_unshare`, Linux 5.19). The bytes that are read do not matter. The pages must be
/// there.
pub(crate) fn unshare(pid: i32, addresses: &[u64]) {
    let mut rest = addresses;
    while !rest.is_empty() {
        let (part, later) = rest.split_at(rest.len().min(MAX_PARTS));
        let mut bytes = [0u8; MAX_PARTS];
        let to = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: part.len() };
        let from: Vec<libc::iovec> = part
            .iter()
            .map(|&address| libc::iovec { iov_base: address as *mut _, iov_len: 1 })
            .collect();
        // SAFETY: the array is this function's.
        if !unsafe { read(pid, &[to], &from) } {
            // One that has gone stops those behind it. They stay shared, and where they are.
            return;
        }
        rest = later;
    }
}

/// Most parts of one read (UIO_MAXIOV).
const MAX_PARTS: usize = 1024;

/// Whether pages of the process are pinned for long, or that cannot be told.
pub(crate) fn has_pins(pid: i32) -> bool {
    let pinned = |thread: i32| {
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
        let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmPin:"))?;
        kilobytes.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    // The status of a first thread that has ended has no `VmPin`: ask the other threads.
    pinned(pid).or_else(|| threads(pid).into_iter().find_map(pinned)) != Some(0)
}

fn threads(pid: i32) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn what_cannot_be_read_is_no_success() {
        let mut child = Command::new("sh")
            .args(["-c", "echo $$; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let pid = child.id() as i32;
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let start = u64::from_str_radix(maps.split('-').next().unwrap(), 16).unwrap();
        let mut magic = [0u8; 4];
        let mut read_at = |address: u64| {
            let to = libc::iovec { iov_base: magic.as_mut_ptr().cast(), iov_len: magic.len() };
            let from = libc::iovec { iov_base: address as *mut _, iov_len: magic.len() };
            // SAFETY: `magic` is this test's.
            unsafe { read(pid, &[to], &[from]) }
        };
        assert!(read_at(start));
        assert!(!read_at(16));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!read_at(start));
        assert_eq!(&magic, b"\x7fELF");
    }
}
