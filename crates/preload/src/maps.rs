//! Reads `/proc/self/maps` without allocating, for what was mapped before the library was.

use crate::sys;
use hecaton_uffd::handover::Range;
use hecaton_uffd::sys::syscall;
use std::os::fd::RawFd;

/// Smaller mappings than this stay as they are: libraries' zeroed data and the loader's own.
const SMALLEST: u64 = 64 << 10;

/// Calls `each` with every mapping that a pager can page: private, anonymous, not a stack, not
/// within `own`, and large enough to be worth it.
pub(crate) fn for_each_pageable(own: Range, mut each: impl FnMut(Range)) {
    let path = c"/proc/self/maps".as_ptr() as usize;
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
    // SAFETY: the path is a C string.
    let opened =
        unsafe { syscall(libc::SYS_openat, [libc::AT_FDCWD as usize, path, flags, 0, 0, 0]) };
    let Ok(fd) = opened else { return };
    let fd = fd as RawFd;
    let mut buffer = [0u8; 4096];
    let mut filled = 0;
    while let Ok(read) = sys::read(fd, &mut buffer[filled..]) {
        filled += read;
        let mut used = 0;
        while let Some(length) = buffer[used..filled].iter().position(|&b| b == b'\n') {
            if let Some(range) = pageable(&buffer[used..used + length], own) {
                each(range);
            }
            used += length + 1;
        }
        if read == 0 || (used == 0 && filled == buffer.len()) {
            break;
        }
        buffer.copy_within(used..filled, 0);
        filled -= used;
    }
    sys::close(fd);
}

/// `start-end perms offset dev inode   path`
fn pageable(line: &[u8], own: Range) -> Option<Range> {
    let mut fields = line.split(|&b| b == b' ').filter(|field| !field.is_empty());
    let mut bounds = fields.next()?.split(|&b| b == b'-');
    let start = hex(bounds.next()?)?;
    let end = hex(bounds.next()?)?;
    let perms = fields.next()?;
    let inode = fields.nth(2)?;
    let name = fields.next().unwrap_or(b"");
    let anonymous =
        inode == b"0" && (name.is_empty() || name == b"[heap]" || name.starts_with(b"[anon:"));
    let overlaps_own = start < own.start + own.len && own.start < end;
    let large_enough = end - start >= SMALLEST || name == b"[heap]";
    (anonymous && perms.get(3) == Some(&b'p') && !overlaps_own && large_enough)
        .then_some(Range { start, len: end - start })
}

fn hex(digits: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok()?;
    u64::from_str_radix(text, 16).ok()
}
