//! What is mapped in a process, as `/proc/PID/maps` says.

use hecaton_uffd::handover::Range;
use std::fs::File;
use std::io::{BufRead, BufReader};

/// A line of `/proc/PID/maps`.
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Private and anonymous, and neither the first stack nor the kernel's own.
    pub(crate) anonymous: bool,
    /// And writable at present.
    pub(crate) pageable: bool,
}

impl Mapping {
    pub(crate) fn overlaps(&self, range: &Range) -> bool {
        self.start < range.start + range.len && range.start < self.end
    }
}

/// The mappings of a process, in order of address.
pub(crate) fn read_mappings(pid: i32) -> std::io::Result<Vec<Mapping>> {
    let file = BufReader::with_capacity(1 << 16, File::open(format!("/proc/{pid}/maps"))?);
    let mut mappings = Vec::new();
    for line in file.lines() {
        if let Some(mapping) = parse_mapping(&line?) {
            mappings.push(mapping);
        }
    }
    Ok(mappings)
}

fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let perms = fields.next()?;
    let inode = fields.nth(2)?;
    let name = fields.next().unwrap_or("");
    let anonymous = inode == "0"
        && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:"))
        && perms.ends_with('p');
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        anonymous,
        pageable: anonymous && perms.starts_with("rw"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_pageable_mappings_from_others() {
        let pageable = |line| parse_mapping(line).unwrap().pageable;
        assert!(pageable("55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0    [heap]"));
        assert!(pageable("7f0000000000-7f0000021000 rw-p 00000000 00:00 0 "));
        assert!(!pageable("7f0000000000-7f0000021000 ---p 00000000 00:00 0 "));
        assert!(!pageable("7ffd0000000-7ffd0021000 rw-p 00000000 00:00 0    [stack]"));
        assert!(!pageable("7f0000000000-7f0000021000 rw-s 00000000 00:01 12  /dev/zero (deleted)"));
        assert!(!pageable("7f0000000000-7f0000021000 rw-p 00001000 fe:00 12  /usr/lib/libc.so.6"));
    }
}
