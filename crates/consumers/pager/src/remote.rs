//! Reading a program's memory.

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
