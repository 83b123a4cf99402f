//! Reads `/proc/self/maps` without allocating: at the start, for what was mapped before the library
//! was, and at each fork.

use crate::sys;
use hecaton_uffd::Errno;
use hecaton_uffd::handover::{LARGEST_FOUND_BYTES, Range};
use hecaton_uffd::sys::syscall;
use std::os::fd::RawFd;

/// Smaller mappings than this stay as they are: libraries' zeroed data and the loader's own.
const SMALLEST: u64 = 64 << 10;

/// Calls `each` with every mapping that is worth paging.
pub(crate) fn for_each_pageable(own: Range, mut each: impl FnMut(Range)) {
    // Without /proc the pager finds none either, and tells of it.
    let _ = for_each_line(|line| {
        if let Some((range, name)) = anonymous(line, own)
            && (range.len >= SMALLEST || name == b"[heap]")
            && range.len <= LARGEST_FOUND_BYTES
        {
            each(range);
        }
    });
}

/// Calls `each` with every mapping that is private and anonymous, in order of address; but for the
/// first stack, and what is in `own`.
pub(crate) fn for_each_anonymous(own: Range, mut each: impl FnMut(Range)) -> Result<(), Errno> {
    for_each_line(|line| {
        if let Some((range, _)) = anonymous(line, own) {
            each(range);
        }
    })
}

fn for_each_line(mut each: impl FnMut(&[u8])) -> Result<(), Errno> {
    let path = c"/proc/self/maps".as_ptr() as usize;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
    // SAFETY: the path is a C string.
    let opened =
        unsafe { syscall(libc::SYS_openat, [libc::AT_FDCWD as usize, path, flags, 0, 0, 0]) };
    let fd = opened? as RawFd;
    let mut buffer = [0u8; 4096];
    let mut filled = 0;
    let outcome = loop {
        let read = match sys::read(fd, &mut buffer[filled..]) {
            Ok(read) => read,
            Err(errno) => break Err(errno),
        };
        filled += read;
        let mut used = 0;
        while let Some(length) = buffer[used..filled].iter().position(|&b| b == b'\n') {
            each(&buffer[used..used + length]);
            used += length + 1;
        }
        if read == 0 {
            break Ok(());
        }
        if used == 0 && filled == buffer.len() {
            // A name of a page's length: a line as no anonymous mapping has.
            break Err(Errno(libc::ENAMETOOLONG));
        }
        buffer.copy_within(used..filled, 0);
        filled -= used;
    };
    sys::close(fd);
    outcome
}

/// The range and the name of a mapping that is private and anonymous: no stack, not within `own`.
///
/// `start-end perms offset dev inode   path`
fn anonymous(line: &[u8], own: Range) -> Option<(Range, &[u8])> {
    let mut fields = line.split(|&b| b == b' ').filter(|field| !field.is_empty());
    let mut bounds = fields.next()?.split(|&b| b == b'-');
    let start = hex(bounds.next()?)?;
    let end = hex(bounds.next()?)?;
    let perms = fields.next()?;
    let inode = fields.nth(2)?;
    let name = fields.next().unwrap_or(b"");
    let is_anonymous =
        inode == b"0" && (name.is_empty() || name == b"[heap]" || name.starts_with(b"[anon:"));
    let overlaps_own = start < own.start + own.len && own.start < end;
    (is_anonymous && perms.get(3) == Some(&b'p') && !overlaps_own)
        .then_some((Range { start, len: end - start }, name))
}

fn hex(digits: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok()?;
    u64::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_memory_is_told_from_files_and_stacks() {
        let own = Range { start: 0x9000, len: 0x3000 };
        let found = |line: &str| anonymous(line.as_bytes(), own).map(|(range, _)| range);
        let range = Range { start: 0x1000, len: 0x2000 };
        assert_eq!(found("1000-3000 rw-p 00000000 00:00 0 "), Some(range));
        assert_eq!(found("1000-3000 ---p 00000000 00:00 0 "), Some(range));
        assert_eq!(found("1000-3000 rw-p 00000000 00:00 0    [heap]"), Some(range));
        assert_eq!(found("1000-3000 rw-p 00000000 00:00 0    [anon:x]"), Some(range));
        assert_eq!(found("1000-3000 rw-p 00000000 00:00 0    [stack]"), None);
        assert_eq!(found("1000-3000 rw-s 00000000 00:01 7    /dev/zero (deleted)"), None);
        assert_eq!(found("1000-3000 rw-p 00000000 fe:00 7    /lib/libc.so.6"), None);
        assert_eq!(found("a000-b000 rw-p 00000000 00:00 0 "), None);
    }

    #[test]
    fn every_line_comes_once() {
        let mut last = 0;
        let mut lines = 0;
        for_each_anonymous(Range::default(), |range| {
            assert!(range.start >= last);
            last = range.start + range.len;
            lines += 1;
        })
        .unwrap();
        assert!(lines > 0);
    }
}
