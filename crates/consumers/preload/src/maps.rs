//! Reads `/proc/self/maps` without allocating: at the start, for what was mapped before the library
//! was, and at each fork.
//!
//! The helper may open no files, and has been given one that is open.

use crate::sys;
use hecaton_uffd::Errno;
use hecaton_uffd::handover::{LARGEST_FOUND_BYTES, Range};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

/// Smaller mappings than this stay as they are: libraries' zeroed data and the loader's own.
const SMALLEST: u64 = 64 << 10;

/// Calls `each` with every mapping that is worth paging.
pub(crate) fn for_each_pageable(own: Range, mut each: impl FnMut(Range)) {
    // Without /proc the pager finds none either, and tells of it.
    let Ok(maps) = open() else { return };
    let _ = for_each_line(maps, |line| {
        if let Some((range, name)) = anonymous(line, own)
            && (range.len >= SMALLEST || name == b"[heap]")
            && range.len <= LARGEST_FOUND_BYTES
        {
            each(range);
        }
    });
    sys::close(maps);
}

/// A descriptor of `/proc/self/maps`, which tells of this memory to whoever reads it.
pub(crate) fn open() -> Result<RawFd, Errno> {
    sys::open(c"/proc/self/maps").or_else(|errno| kept().ok_or(errno))
}

/// Whether a child can open its own.
pub(crate) fn may_be_read() -> Result<(), Errno> {
    sys::open(c"/proc/self/maps").map(sys::close)
}

/// An open `/proc/self/maps`, for when the program has left for a directory without (`chroot`); -1:
/// none.
#[unsafe(link_section = ".data")]
static KEPT: AtomicI32 = AtomicI32::new(-1);
/// Tells whether the number is another file's by now.
#[unsafe(link_section = ".data")]
static KEPT_FILE: AtomicU64 = AtomicU64::new(0);

/// Keeps one open.
pub(crate) fn keep() {
    if let Ok(opened) = sys::open(c"/proc/self/maps") {
        let kept = sys::out_of_the_way(opened);
        KEPT_FILE.store(sys::file_number(kept).unwrap_or(0), Relaxed);
        KEPT.store(kept, Relaxed);
    }
}

/// In the child of a fork: what its parent has kept tells of its parent's memory.
pub(crate) fn forget_parents() {
    let kept = KEPT.swap(-1, Relaxed);
    if kept >= 0 && sys::file_number(kept) == Some(KEPT_FILE.load(Relaxed)) {
        sys::close(kept);
    }
}

fn kept() -> Option<RawFd> {
    let kept = KEPT.load(Relaxed);
    (kept >= 0 && sys::file_number(kept) == Some(KEPT_FILE.load(Relaxed)))
        .then(|| sys::duplicate(kept).ok())
        .flatten()
}

/// Calls `each` with every mapping that is private and anonymous, in order of address; but for the
/// first stack, and what is in `own`.
pub(crate) fn for_each_anonymous(
    maps: RawFd,
    own: Range,
    mut each: impl FnMut(Range),
) -> Result<(), Errno> {
    for_each_line(maps, |line| {
        if let Some((range, _)) = anonymous(line, own) {
            each(range);
        }
    })
}

/// The same for those that can be read.
pub(crate) fn for_each_readable_anonymous(
    maps: RawFd,
    own: Range,
    mut each: impl FnMut(Mapping),
) -> Result<(), Errno> {
    for_each_line(maps, |line| {
        if anonymous(line, own).is_some()
            && let Some(Fields { range, permissions: [b'r', write, ..], .. }) = fields(line)
        {
            each(Mapping { range, is_writable: *write == b'w', is_private: true });
        }
    })
}

/// A mapping of any kind.
pub(crate) struct Mapping {
    pub(crate) range: Range,
    pub(crate) is_writable: bool,
    pub(crate) is_private: bool,
}

/// Calls `each` with every mapping, in order of address, that can be accessed and is not in `own`.
pub(crate) fn for_each(
    maps: RawFd,
    own: Range,
    mut each: impl FnMut(Mapping),
) -> Result<(), Errno> {
    for_each_line(maps, |line| {
        if let Some(fields) = fields(line)
            && matches!(fields.permissions, [b'r', ..] | [_, b'w', ..])
            && !overlap(fields.range, own)
        {
            let [_, w, _, p, ..] = *fields.permissions else { return };
            each(Mapping { range: fields.range, is_writable: w == b'w', is_private: p == b'p' });
        }
    })
}

fn for_each_line(maps: RawFd, mut each: impl FnMut(&[u8])) -> Result<(), Errno> {
    let mut at = 0;
    let mut buffer = [0u8; 4096];
    let mut filled = 0;
    loop {
        let read = sys::read_at(maps, &mut buffer[filled..], at)?;
        at += read;
        filled += read;
        let mut used = 0;
        while let Some(length) = buffer[used..filled].iter().position(|&b| b == b'\n') {
            each(&buffer[used..used + length]);
            used += length + 1;
        }
        if read == 0 {
            return Ok(());
        }
        if used == 0 && filled == buffer.len() {
            // A name of a page's length: a line as no anonymous mapping has.
            return Err(Errno(libc::ENAMETOOLONG));
        }
        buffer.copy_within(used..filled, 0);
        filled -= used;
    }
}

/// `start-end perms offset dev inode   path`
struct Fields<'a> {
    range: Range,
    permissions: &'a [u8],
    inode: &'a [u8],
    name: &'a [u8],
}

fn fields(line: &[u8]) -> Option<Fields<'_>> {
    let mut fields = line.split(|&b| b == b' ').filter(|field| !field.is_empty());
    let mut bounds = fields.next()?.split(|&b| b == b'-');
    let start = hex(bounds.next()?)?;
    let end = hex(bounds.next()?)?;
    let permissions = fields.next()?;
    let inode = fields.nth(2)?;
    let name = fields.next().unwrap_or(b"");
    Some(Fields { range: Range { start, len: end - start }, permissions, inode, name })
}

/// The range and the name of a mapping that is private and anonymous: no stack, not within `own`.
fn anonymous(line: &[u8], own: Range) -> Option<(Range, &[u8])> {
    let Fields { range, permissions, inode, name } = fields(line)?;
    let is_anonymous =
        inode == b"0" && (name.is_empty() || name == b"[heap]" || name.starts_with(b"[anon:"));
    (is_anonymous && permissions.get(3) == Some(&b'p') && !overlap(range, own))
        .then_some((range, name))
}

fn overlap(one: Range, other: Range) -> bool {
    one.start < other.start + other.len && other.start < one.start + one.len
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
        let maps = open().unwrap();
        let listed = || {
            let (mut last, mut lines) = (0, 0);
            for_each_anonymous(maps, Range::default(), |range| {
                assert!(range.start >= last);
                last = range.start + range.len;
                lines += 1;
            })
            .unwrap();
            lines
        };
        assert!(listed() > 0);
        assert!(listed() > 0, "an open file can be read again");
        sys::close(maps);
    }
}
