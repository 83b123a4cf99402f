//! All guest RAM of one hypervisor.

use super::memory_file::{Identity, MemoryFile};
use super::region::Region;
use super::span::{MAX_REGIONS, Span, meets};
use crate::process::guard::ram_label;
use crate::programs::address_space::Mapped;
use crate::state::{CHUNK_PAGES, REGION_WORDS, State};
use hecaton_memory::PAGE_SIZE;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::Relaxed;

const PAGE: u64 = PAGE_SIZE as u64;

/// Bytes of a chunk, of which each has its place in the space.
const CHUNK: u64 = CHUNK_PAGES * PAGE;

/// A memory file as it was handed over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldFile {
    pub(crate) file: MemoryFile,
    /// The node holds it under this number.
    pub(crate) serial: u64,
}

/// Result of renumbering the memory files.
#[derive(Default)]
pub(crate) struct RenumberedFiles {
    /// Serial numbers of those that are in use.
    pub(crate) found: BTreeSet<u64>,
    /// A machine ran on a file that is not held.
    pub(crate) lost: bool,
}

/// A page's place in a memory file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FilePlace {
    pub(crate) file: MemoryFile,
    pub(crate) offset: u64,
}

/// All guest RAM of one hypervisor, sorted by address.
#[derive(Debug, Default)]
pub(crate) struct Ram {
    /// The connection on which further regions come; its end may mean that the hypervisor has
    /// ended.
    pub(crate) socket: Option<RawFd>,
    regions: Vec<Region>,
}

impl Ram {
    pub(crate) fn new(socket: Option<RawFd>) -> Ram {
        Ram { socket, regions: Vec::new() }
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        self.regions.iter().map(|region| region.span).collect()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.span.len).sum()
    }

    /// Bytes that the memory files take on this host.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        let mut seen: Vec<Identity> = Vec::new();
        let mut bytes = 0;
        for region in &self.regions {
            if let (Some(file), Some(identity)) = (region.file, region.span.file)
                && !seen.contains(&identity)
            {
                seen.push(identity);
                bytes += file.allocated_bytes();
            }
        }
        bytes
    }

    /// Whether its pages are in files that the pager has.
    pub(crate) fn has_files(&self) -> bool {
        self.regions.iter().all(|region| region.file.is_some())
    }

    /// Whether its pages can be write-protected: `libhecaton.so` registers files so, and a
    /// hypervisor that hands private memory over does not.
    pub(crate) fn protects(&self) -> bool {
        self.has_files()
    }

    fn region_at(&self, address: u64) -> Option<&Region> {
        let next = self.regions.partition_point(|region| region.span.start <= address);
        let region = &self.regions[next.checked_sub(1)?];
        (address < region.span.addresses().end).then_some(region)
    }

    /// The end of the region that holds `address`.
    pub(crate) fn region_end(&self, address: u64) -> Option<u64> {
        self.region_at(address).map(|region| region.span.addresses().end)
    }

    /// Where the page is in a file, if the pager has that file: only such pages can be taken away.
    pub(crate) fn place(&self, address: u64) -> Option<FilePlace> {
        let region = self.region_at(address)?;
        Some(FilePlace { file: region.file?, offset: region.offset_of(address) })
    }

    /// Which byte of the machine's RAM is at `address`: regions follow one another in the order in
    /// which they came.
    pub(crate) fn position(&self, address: u64) -> Option<u64> {
        let region = self.region_at(address)?;
        Some(region.position + (address - region.span.start))
    }

    /// Where a region that begins at `start` continues the machine's RAM: behind all others, and as
    /// far into a chunk as it begins in one.
    fn next_position(&self, start: u64) -> u64 {
        let ends = self.regions.iter().map(|region| region.position + region.span.len);
        ends.max().unwrap_or(0).next_multiple_of(CHUNK) + start % CHUNK
    }

    /// Adds a region that was checked; it owns `file` from now on. False when there is no place
    /// left to write it down.
    pub(crate) fn add(
        &mut self,
        state: &State,
        space: usize,
        span: Span,
        file: Option<HeldFile>,
    ) -> bool {
        self.add_at(state, space, span, file, self.next_position(span.start))
    }

    fn add_at(
        &mut self,
        state: &State,
        space: usize,
        span: Span,
        file: Option<HeldFile>,
        position: u64,
    ) -> bool {
        let free = |at: &usize| state.regions[at * REGION_WORDS].load(Relaxed) == 0;
        let Some(saved_at) = (0..MAX_REGIONS).find(free) else { return false };
        let serial = file.map_or(0, |file| file.serial);
        let region = Region { span, file: file.map(|file| file.file), serial, position, saved_at };
        region.save(state, space);
        let at = self.regions.partition_point(|other| other.span.start < span.start);
        self.regions.insert(at, region);
        true
    }

    /// Takes out the parts of regions within `addresses`. Returns what was punched off: the parts
    /// of files that nobody maps any more, and the files that no region names any more.
    pub(crate) fn remove(
        &mut self,
        state: &State,
        space: usize,
        addresses: &Range<u64>,
    ) -> (Vec<(MemoryFile, Range<u64>)>, Vec<HeldFile>) {
        let (mut parts, mut files) = (Vec::new(), Vec::new());
        for region in std::mem::take(&mut self.regions) {
            let whole = region.span.addresses();
            let (from, to) = (whole.start.max(addresses.start), whole.end.min(addresses.end));
            if from >= to {
                self.regions.push(region);
                continue;
            }
            if let Some(file) = region.file {
                parts.push((file, region.offset_of(from)..region.offset_of(to)));
            }
            let mut kept = false;
            for rest in [whole.start..from, to..whole.end] {
                if !rest.is_empty() {
                    let span = Span {
                        start: rest.start,
                        len: rest.end - rest.start,
                        offset: region.offset_of(rest.start),
                        file: region.span.file,
                    };
                    let file = region.file.map(|file| HeldFile { file, serial: region.serial });
                    let position = region.position + (rest.start - whole.start);
                    kept |= self.add_at(state, space, span, file, position);
                }
            }
            // The remaining parts are saved before the whole is erased. A kill in between leaves
            // both, and `load` prefers the parts.
            Region::erase(state, region.saved_at);
            let file = region.file.filter(|_| !kept);
            files.extend(file.map(|file| HeldFile { file, serial: region.serial }));
        }
        self.regions.sort_by_key(|region| region.span.start);
        // Two parts of one region name one descriptor.
        files.retain(|held| !self.regions.iter().any(|region| region.file == Some(held.file)));
        (parts, files)
    }

    /// All regions of the address space `space`, as a predecessor wrote them down.
    pub(crate) fn load(state: &State, space: usize, socket: Option<RawFd>) -> Ram {
        let regions = (0..MAX_REGIONS).filter_map(|at| Region::load(state, at, space));
        let mut found: Vec<Region> = regions.collect();
        found.sort_by_key(|region| region.span.len);
        let mut ram = Ram::new(socket);
        for region in found {
            let whole = region.span.addresses();
            if ram.regions.iter().any(|other| meets(&other.span.addresses(), &whole)) {
                Region::erase(state, region.saved_at);
            } else {
                ram.regions.push(region);
            }
        }
        ram.regions.sort_by_key(|region| region.span.start);
        ram
    }

    /// Regions whose address space was never written down: who handed them over was not answered.
    pub(crate) fn erase_orphans(state: &State, exists: impl Fn(usize) -> bool) {
        for at in 0..MAX_REGIONS {
            let owner = state.regions[at * REGION_WORDS].load(Relaxed).checked_sub(1);
            if owner.is_some_and(|owner| !exists(owner as usize)) {
                Region::erase(state, at);
            }
        }
    }

    /// The address space is gone: what was written down of it is void.
    pub(crate) fn erase(&self, state: &State) {
        self.regions.iter().for_each(|region| Region::erase(state, region.saved_at));
    }

    /// The files, with the labels under which the node holds them.
    pub(crate) fn held(&self) -> Vec<(String, RawFd)> {
        let file = |region: &Region| Some((region.serial, region.file?.0));
        let files: BTreeMap<u64, RawFd> = self.regions.iter().filter_map(file).collect();
        files.into_iter().map(|(serial, fd)| (ram_label(serial), fd)).collect()
    }

    /// The files have other numbers now: `number` gives them by serial number, as far as they are
    /// still held.
    pub(crate) fn renumber(
        state: &State,
        number: impl Fn(u64) -> Option<RawFd>,
    ) -> RenumberedFiles {
        let mut renumbered = RenumberedFiles::default();
        for at in 0..MAX_REGIONS {
            let words = &state.regions[at * REGION_WORDS..][..REGION_WORDS];
            let serial = words[5].load(Relaxed);
            if words[0].load(Relaxed) == 0 || serial == 0 {
                continue;
            }
            match number(serial) {
                Some(fd) => {
                    words[1].store(fd as u64 + 1, Relaxed);
                    renumbered.found.insert(serial);
                }
                None => renumbered.lost = true,
            }
        }
        renumbered
    }

    /// Tells which of `count` pages from `vpn` on are present. The kernel does not tell whether a
    /// file's pages are write-protected; the pager's own note of it holds.
    pub(crate) fn mapped(&self, vpn: u64, count: usize) -> io::Result<Vec<Mapped>> {
        let mut mapped = vec![Mapped { present: false, protected: None, exclusive: false }; count];
        let wanted = vpn * PAGE..(vpn + count as u64) * PAGE;
        for region in &self.regions {
            let Some(file) = region.file else { continue };
            let whole = region.span.addresses();
            let (from, to) = (whole.start.max(wanted.start), whole.end.min(wanted.end));
            if from >= to {
                continue;
            }
            for data in file.data_in(region.offset_of(from)..region.offset_of(to))? {
                let first = data.start - region.span.offset + region.span.start;
                let pages = (data.end - data.start).div_ceil(PAGE);
                let at = ((first - wanted.start) / PAGE) as usize;
                mapped[at..at + pages as usize].iter_mut().for_each(|page| page.present = true);
            }
        }
        Ok(mapped)
    }
}
