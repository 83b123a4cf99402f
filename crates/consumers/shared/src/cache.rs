//! Asks the kernel which pages of a file the page cache has, and has it write them back or drop
//! them.

use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

/// The libc crate does not have the number yet. It is the same on all architectures.
const SYS_CACHESTAT: libc::c_long = 451;

/// Pages of a file in the page cache.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Cached {
    /// All.
    pub pages: u64,
    /// Those that must be written back before they can be dropped.
    pub dirty: u64,
    /// Those that are being written back.
    pub in_write_back: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// The pages of these bytes that are in the page cache; 0..0 means the whole file.
///
/// # Errors
/// `ENOSYS` before Linux 6.5.
pub fn cached(file: impl AsFd, bytes: Range<u64>) -> Result<Cached, Errno> {
    let range = [bytes.start, bytes.end - bytes.start];
    let mut cached = Cached::default();
    // SAFETY: the kernel reads two words of `range`, and writes the five of `cached`.
    let done = unsafe {
        let (range, cached) = (range.as_ptr(), &raw mut cached);
        libc::syscall(SYS_CACHESTAT, file.as_fd().as_raw_fd(), range, cached, 0)
    };
    if done == 0 { Ok(cached) } else { Err(last_error()) }
}

/// Has dirty pages written back; with `wait`, returns when that is done.
///
/// # Errors
/// A page could not be written.
pub fn write_back(file: impl AsFd, bytes: Range<u64>, wait: bool) -> Result<(), Errno> {
    let flags = match wait {
        true => libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WAIT_AFTER,
        false => 0,
    };
    let (at, len) = (bytes.start as i64, (bytes.end - bytes.start) as i64);
    let flags = flags | libc::SYNC_FILE_RANGE_WRITE;
    // SAFETY: numbers only.
    let done = unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), at, len, flags) };
    if done == 0 { Ok(()) } else { Err(last_error()) }
}

/// Advises the kernel to drop pages. It keeps those that are dirty, mapped or pinned.
///
/// # Errors
/// The file is of a kind without a page cache.
pub fn drop_clean(file: impl AsFd, bytes: Range<u64>) -> Result<(), Errno> {
    fadvise(file, bytes.start, NonZeroU64::new(bytes.end - bytes.start), Advice::DontNeed)
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn pages_are_counted_from_the_write_to_the_drop() {
        // Not a tmpfs, where a dirty page has no other place.
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        file.write_all_at(&[1; 4096], 0).expect("written");
        file.write_all_at(&[1; 4096], 3 * 4096).expect("written");
        let count = |bytes| match cached(&file, bytes) {
            Ok(cached) => Some(cached.pages),
            Err(Errno::NOSYS) => None,
            Err(errno) => panic!("{errno}"),
        };
        let Some(all) = count(0..0) else {
            println!("skipped: before Linux 6.5 the kernel does not tell");
            return;
        };
        assert_eq!((all, count(4096..8192), count(4096..16384)), (2, Some(0), Some(1)));
        write_back(&file, 0..16384, true).expect("written back");
        drop_clean(&file, 0..4096).expect("advised");
        assert_eq!(count(0..0), Some(1));
    }
}
