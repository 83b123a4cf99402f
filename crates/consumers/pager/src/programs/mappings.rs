//! Reads the mappings of a process from `/proc/PID/maps`: all, or the one at an address.

use hecaton_uffd::handover::{LARGEST_FOUND_BYTES, Range};
use rustix::io::Errno;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;

/// A line of `/proc/PID/maps`.
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Private and anonymous, and neither the first stack nor the kernel's own.
    pub(crate) anonymous: bool,
    pub(crate) writable: bool,
}

impl Mapping {
    pub(crate) fn is_pageable(&self) -> bool {
        self.anonymous && self.writable && self.end - self.start <= LARGEST_FOUND_BYTES
    }

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

/// The memory of a process that a fork has left empty, or will (`MADV_WIPEONFORK`). Costs more than
/// the mappings alone: the kernel looks at each page.
pub(crate) fn wiped_on_fork(pid: i32) -> std::io::Result<Vec<Range>> {
    let file = BufReader::with_capacity(1 << 16, File::open(format!("/proc/{pid}/smaps"))?);
    let (mut wiped, mut at) = (Vec::new(), None);
    for line in file.lines() {
        let line = line?;
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let is_wiped = flags.split_ascii_whitespace().any(|flag| flag == "wf");
            wiped.extend(at.take().filter(|_| is_wiped));
        } else if let Some(mapping) = parse_mapping(&line) {
            at = Some(Range { start: mapping.start, len: mapping.end - mapping.start });
        }
    }
    Ok(wiped)
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
        writable: perms.starts_with("rw"),
    })
}

/// Looks up mappings by address: one system call for each (Linux 6.11), or else reads all of them
/// once.
pub(crate) struct MappingQuery {
    pid: i32,
    maps: Option<File>,
    all: Option<Vec<Mapping>>,
    /// The last answer: neighbours are mostly in one mapping.
    last: Option<(Range, bool)>,
}

impl MappingQuery {
    /// Its answers are true as of the first question or later.
    pub(crate) fn new(pid: i32) -> MappingQuery {
        let maps = File::open(format!("/proc/{pid}/maps")).ok();
        MappingQuery { pid, maps, all: None, last: None }
    }

    /// Whether the mapping at `address` is writable. `None`: there is none, or the process is gone.
    pub(crate) fn is_writable(&mut self, address: u64) -> Option<bool> {
        if let Some((range, writable)) = self.last
            && (range.start..range.start + range.len).contains(&address)
        {
            return Some(writable);
        }
        let found = match query(self.maps.as_ref()?, address) {
            Ok(found) => found,
            Err(Errno::NOENT) => return None,
            Err(_) => self.find(address)?,
        };
        self.last = Some(found);
        Some(found.1)
    }

    fn find(&mut self, address: u64) -> Option<(Range, bool)> {
        let pid = self.pid;
        let all = self.all.get_or_insert_with(|| read_mappings(pid).unwrap_or_default());
        let next = all.partition_point(|mapping| mapping.start <= address);
        let mapping = all.get(next.checked_sub(1)?).filter(|mapping| address < mapping.end)?;
        let range = Range { start: mapping.start, len: mapping.end - mapping.start };
        Some((range, mapping.writable))
    }
}

/// `struct procmap_query` of `<linux/fs.h>`.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    /// Page size, offset and inode.
    unused: [u64; 3],
    /// Device, and the lengths of name and build ID, which are not asked for.
    unasked: [u32; 4],
    places: [u64; 2],
}

/// `_IOWR('f', 17, struct procmap_query)`
const PROCMAP_QUERY: u64 = 0xC068_6611;
const PROCMAP_QUERY_VMA_WRITABLE: u64 = 2;

const _: () = assert!(size_of::<ProcmapQuery>() == (PROCMAP_QUERY as usize >> 16) & 0x3FFF);

fn query(maps: &File, address: u64) -> Result<(Range, bool), Errno> {
    let mut query = ProcmapQuery::default();
    (query.size, query.query_addr) = (size_of::<ProcmapQuery>() as u64, address);
    // SAFETY: the kernel reads and writes the structure, whose size is part of the number.
    if unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) } < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_raw_os_error(error.raw_os_error().unwrap_or_default()));
    }
    let range = Range { start: query.vma_start, len: query.vma_end - query.vma_start };
    Ok((range, query.vma_flags & PROCMAP_QUERY_VMA_WRITABLE != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_pageable_mappings_from_others() {
        let pageable = |line| parse_mapping(line).unwrap().is_pageable();
        assert!(pageable("55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0    [heap]"));
        assert!(pageable("7f0000000000-7f0000021000 rw-p 00000000 00:00 0 "));
        assert!(!pageable("2008fff7000-10007fff8000 rw-p 00000000 00:00 0 "));
        assert!(!pageable("7f0000000000-7f0000021000 ---p 00000000 00:00 0 "));
        assert!(!pageable("7ffd0000000-7ffd0021000 rw-p 00000000 00:00 0    [stack]"));
        assert!(!pageable("7f0000000000-7f0000021000 rw-s 00000000 00:01 12  /dev/zero (deleted)"));
        assert!(!pageable("7f0000000000-7f0000021000 rw-p 00001000 fe:00 12  /usr/lib/libc.so.6"));
    }

    #[test]
    fn finds_what_a_fork_leaves_empty() {
        let len = 1 << 16;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice, and advice on a part of it.
        let start = unsafe {
            let at = libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::madvise(at.add(4096), 8192, libc::MADV_WIPEONFORK), 0);
            at as u64
        };
        let wiped = wiped_on_fork(std::process::id() as i32).unwrap();
        let expected = Range { start: start + 4096, len: 8192 };
        assert!(wiped.contains(&expected), "{wiped:x?}");
        assert!(!wiped.iter().any(|range| range.start == start), "{wiped:x?}");
    }

    #[test]
    fn finds_whether_memory_is_writable() {
        let text = finds_whether_memory_is_writable as fn() as usize as u64;
        let memory = vec![1u8; 1 << 20];
        let pid = std::process::id() as i32;
        let mut asked = MappingQuery::new(pid);
        let mut read = MappingQuery::new(pid);
        for (address, writable) in
            [(memory.as_ptr() as u64, Some(true)), (text, Some(false)), (16, None)]
        {
            assert_eq!(asked.is_writable(address), writable, "{address:#x}");
            // As on a kernel that cannot be asked.
            assert_eq!(read.find(address).map(|(_, writable)| writable), writable, "{address:#x}");
        }
    }
}
