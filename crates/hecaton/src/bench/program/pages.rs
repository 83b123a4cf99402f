//! Finds each memory page's owner on this machine: a process, others, or none.
//! Figure 9 of "Memory-Harvesting VMs in Cloud Platforms" (2022) shows the same.
//!
//! The kernel describes each page (`/proc/kpageflags`) and a process's pages (`/proc/PID/pagemap`)
//! to root only. Between the two reads pages may change owners, except those of a resting process.

use anyhow::{Context as _, ensure};
use hecaton_memory::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::{fs, fs::File, ops::Range, os::unix::fs::FileExt as _};

/// Arguments of `pages`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The process whose pages are told from others'.
    #[arg(long)]
    pid: u32,
}

/// Consecutive pages of memory, from `first` on.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(in crate::bench) struct Stretch {
    /// The number of the first page.
    pub(in crate::bench) first: u64,
    /// Hexadecimal digits with the [`Owner`]s of two pages each, the first in the upper half.
    pub(in crate::bench) owners: String,
}

/// The owner of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::bench) enum Owner {
    /// The page is not, or no longer, the machine's.
    Gone,
    /// The page has no owner.
    Free,
    /// The process.
    Process,
    /// Other programs, and the kernel.
    Other,
}

impl Owner {
    pub(in crate::bench) const ALL: [Self; 4] =
        [Self::Gone, Self::Free, Self::Process, Self::Other];
}

/// Bits of `/proc/kpageflags` (`linux/kernel-page-flags.h`).
const BUDDY: u64 = 1 << 10;
const NO_PAGE: u64 = 1 << 20;
const OFFLINE: u64 = 1 << 23;

/// Bits of an entry of `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Entries that are read at once.
const AT_ONCE: u64 = 1 << 16;

pub(super) fn run(args: &Args) -> anyhow::Result<Vec<Stretch>> {
    let own = frames(args.pid)?;
    ensure!(own.iter().any(|frame| *frame > 0), "the kernel shows page numbers to root only");
    let flags = File::open("/proc/kpageflags").context("/proc/kpageflags")?;
    let iomem = fs::read_to_string("/proc/iomem")?;
    let ranges = memory(&iomem);
    ensure!(!ranges.is_empty(), "/proc/iomem shows no memory");
    ranges
        .into_iter()
        .map(|range| {
            let first = range.start;
            let mut owners = Vec::new();
            entries(&flags, range, |page, flags| {
                let is_own = own.binary_search(&page).is_ok();
                owners.push(owner(flags, is_own));
            })?;
            Ok(Stretch { first, owners: digits(&owners) })
        })
        .collect()
}

/// Page frame numbers of a process, sorted.
fn frames(pid: u32) -> anyhow::Result<Vec<u64>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))
        .with_context(|| format!("process {pid}"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut frames = Vec::new();
    for line in maps.lines() {
        // A page of the kernel, beyond the addresses that can be mapped.
        if line.ends_with("[vsyscall]") {
            continue;
        }
        let range = line.split(' ').next().and_then(hexadecimal).context("/proc/PID/maps")?;
        let page = PAGE_SIZE as u64;
        entries(&pagemap, range.start / page..range.end / page, |_, entry| {
            if entry & PRESENT != 0 {
                frames.push(entry & FRAME);
            }
        })?;
    }
    frames.sort_unstable();
    Ok(frames)
}

/// Ranges of memory in pages, without partial pages at the ends.
fn memory(iomem: &str) -> Vec<Range<u64>> {
    let page = PAGE_SIZE as u64;
    let ranges = iomem.lines().filter_map(|line| {
        let (range, name) = line.trim().split_once(" : ")?;
        let range = hexadecimal(range).filter(|_| name.starts_with("System RAM"))?;
        Some(range.start.div_ceil(page)..(range.end + 1) / page)
    });
    ranges.filter(|range| !range.is_empty()).collect()
}

fn hexadecimal(range: &str) -> Option<Range<u64>> {
    let (start, end) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(start)?..number(end)?)
}

/// Reads entries of eight bytes each from a file of the kernel.
fn entries(file: &File, range: Range<u64>, mut each: impl FnMut(u64, u64)) -> anyhow::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let count = AT_ONCE.min(range.end - at);
        let mut bytes = vec![0; count as usize * 8];
        file.read_exact_at(&mut bytes, at * 8)?;
        for (page, entry) in (at..).zip(bytes.chunks_exact(8)) {
            each(page, u64::from_ne_bytes(entry.try_into().expect("chunks of eight bytes")));
        }
        at += count;
    }
    Ok(())
}

fn owner(flags: u64, is_own: bool) -> Owner {
    if flags & (NO_PAGE | OFFLINE) != 0 {
        Owner::Gone
    } else if flags & BUDDY != 0 {
        Owner::Free
    } else if is_own {
        Owner::Process
    } else {
        Owner::Other
    }
}

fn digits(owners: &[Owner]) -> String {
    let two = |two: &[Owner]| {
        let second = two.get(1).copied().unwrap_or(Owner::Gone);
        char::from_digit(two[0] as u32 * 4 + second as u32, 16).expect("below 16")
    };
    owners.chunks(2).map(two).collect()
}

impl Stretch {
    /// Decodes the owners. For an odd number of pages, adds one [`Owner::Gone`].
    pub(in crate::bench) fn pages(&self) -> anyhow::Result<Vec<Owner>> {
        let digit = |digit: char| digit.to_digit(16).context("owners are hexadecimal digits");
        let digits = self.owners.chars().map(digit).collect::<anyhow::Result<Vec<u32>>>()?;
        let two = |digit: u32| [digit / 4, digit % 4].map(|owner| Owner::ALL[owner as usize]);
        Ok(digits.into_iter().flat_map(two).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_of_whom_the_kernel_says() {
        assert_eq!(owner(BUDDY, false), Owner::Free);
        assert_eq!(owner(1 << 5, true), Owner::Process);
        assert_eq!(owner(1 << 5, false), Owner::Other);
        // The page was freed between the two reads.
        assert_eq!(owner(BUDDY, true), Owner::Free);
        assert_eq!(owner(NO_PAGE, true), Owner::Gone);
        assert_eq!(owner(OFFLINE | BUDDY, false), Owner::Gone);
    }

    #[test]
    fn owners_go_through_a_line_of_text() {
        let owners = [Owner::Free, Owner::Process, Owner::Other, Owner::Gone, Owner::Free];
        let stretch = Stretch { first: 7, owners: digits(&owners) };
        assert_eq!(stretch.owners, "6c4");
        let mut with_one_more = owners.to_vec();
        with_one_more.push(Owner::Gone);
        assert_eq!(stretch.pages().unwrap(), with_one_more);
        assert!(Stretch { first: 0, owners: "x".into() }.pages().is_err());
    }

    #[test]
    fn memory_is_what_the_kernel_lists() {
        let iomem = "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n  00002000-00002fff : Kernel code\n\
                     100000000-17fffffff : virtio0\n  100000000-107ffffff : System RAM (virtio_mem)\n";
        assert_eq!(memory(iomem), [1..0x9f, 0x100_000..0x108_000]);
    }

    #[test]
    fn this_process_has_pages() {
        let frames = frames(std::process::id()).unwrap();
        // The kernel shows zeros to users other than root.
        assert!(frames.len() > 100 && frames.is_sorted());
    }
}
