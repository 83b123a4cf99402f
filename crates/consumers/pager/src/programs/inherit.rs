//! Copies a parent's entries to its forked child, and corrects them by the child's memory. Steps 2
//! and 4 of [`crate::programs::fork`].

use crate::core::Core;
use crate::process::guard::helper_label;
use crate::programs::address_space::AddressSpace;
use crate::programs::helper::Helper;
use crate::programs::mappings::{Mapping, read_mappings, wiped_on_fork};
use crate::programs::remote::Memory;
use crate::programs::stage::Stage;
use crate::state::CHUNK_PAGES;
use crate::state::entry::{Entry, Place};
use crate::state::tables::{ALL_PAGES, Key};
use hecaton_memory::PAGE_SIZE;
use hecaton_policy::evict::Installed;
use hecaton_uffd::Uffd;
use hecaton_uffd::abi::{UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP};
use hecaton_uffd::handover::Range;
use std::os::fd::RawFd;

const PAGE: u64 = PAGE_SIZE as u64;

impl Core {
    /// Makes the child's address space. `None`: there are too many processes.
    pub(crate) fn copy_for_child(&mut self, parent: usize, connection: RawFd) -> Option<usize> {
        let mut space = AddressSpace::new(Uffd(-1), Helper::only_connection(connection));
        space.stage = Stage::Preparing;
        let child = self.add_space(space)?;
        for first in self.tables.chunks_in(parent, ALL_PAGES) {
            for key in (0..CHUNK_PAGES).map(|i| first.plus(i)) {
                let entry = self.get(key);
                if entry.place() != Place::Zero && !self.inherit(Key::new(child, key.vpn()), entry)
                {
                    // The parent keeps the connection, to be told why.
                    self.spaces[child].as_mut().expect("just made").helper = None;
                    self.end_space(child);
                    return None;
                }
            }
        }
        self.emptied.inherit(parent, child);
        let space = self.spaces[child].as_mut().expect("just made");
        // Once the parent has forked, nobody but the child has this connection's other end.
        self.guard.hold(vec![helper_label(space.serial)], &[connection]);
        space.advance(&self.state, child, Stage::Forking { parent: Some(parent) });
        Some(child)
    }

    /// False if no more processes can share an evicted page.
    fn inherit(&mut self, key: Key, parents: Entry) -> bool {
        let mut entry = parents;
        if entry.place() == Place::Fetching {
            entry = entry.with_place(Place::Out).with_awaited(false).with_dirty(false);
        }
        if let Some(page) = entry.space_page()
            && !self.pages.share(&self.state, page)
        {
            if entry.place() == Place::Out {
                return false;
            }
            entry = entry.with_space_page(None).with_dirty(true);
        }
        self.set(key, entry);
        if entry.place() == Place::Resident {
            self.count_in(key, Installed::Demand);
        }
        true
    }

    /// `mremap` has moved a range of the parent's, about when it forked.
    pub(crate) fn moved_at_fork(&mut self, parent: usize, from: u64, to: u64, len: u64) {
        let children: Vec<(usize, i32)> = self
            .children_of(parent)
            .filter_map(|(child, space)| Some((child, space.pid?)))
            .collect();
        for (child, pid) in children {
            // An error means that the child has ended, which its connection tells.
            let Ok(mappings) = read_mappings(pid) else { continue };
            let is_mapped = |start| {
                let range = Range { start, len };
                mappings.iter().any(|mapping| mapping.overlaps(&range))
            };
            // If both are, it was moved onto another mapping after the fork: none was made in the
            // place of the old one before.
            if is_mapped(to) && !is_mapped(from) {
                self.move_entries(child, from, to, len);
            }
        }
    }

    fn has_entries(&mut self, space: usize, start: u64, end: u64) -> bool {
        let (first, end) = (start / PAGE, end.div_ceil(PAGE));
        let chunks = self.tables.chunks_in(space, first..end);
        chunks.into_iter().any(|chunk| {
            let pages = chunk.vpn().max(first)..(chunk.vpn() + CHUNK_PAGES).min(end);
            pages.into_iter().any(|vpn| self.get(Key::new(space, vpn)) != Entry::ZERO)
        })
    }

    /// The child has attached, and waits: brings its mappings and its entries in line. `wipes`:
    /// some of its memory may be to be empty (`MADV_WIPEONFORK`). May be done twice.
    pub(crate) fn adopt_child(
        &mut self,
        child: usize,
        uffd: Uffd,
        wipes: bool,
    ) -> Result<(), String> {
        let space = self.spaces[child].as_mut().expect("it has just attached");
        let pid = space.pid.expect("it has said so");
        let gone = |error: std::io::Error| format!("its memory cannot be looked at: {error}");
        let mappings = read_mappings(pid).map_err(gone)?;
        let mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
        let mut registered: Vec<&Mapping> = Vec::new();
        for mapping in mappings.iter().filter(|mapping| mapping.anonymous) {
            let (start, len) = (mapping.start, mapping.end - mapping.start);
            // Others had nothing of the parent's in them that the pager knows of: housekeeping
            // finds them.
            if !self.has_entries(child, start, mapping.end) {
                continue;
            }
            uffd.register(start, len, mode).map_err(|errno| {
                let error = std::io::Error::from(errno);
                format!("memory at {start:#x} cannot be registered: {error}")
            })?;
            registered.push(mapping);
            let space = self.spaces[child].as_mut().expect("as above");
            space.remember_registered(Range { start, len });
        }
        self.discard_unmapped(child, &registered);
        let wiped = if wipes { wiped_on_fork(pid).map_err(gone)? } else { Vec::new() };
        wiped.into_iter().for_each(|range| self.discard_wiped(child, range));
        for mapping in registered {
            let (first, end) = (mapping.start / PAGE, mapping.end / PAGE);
            for chunk in self.tables.chunks_in(child, first..end) {
                let chunk = chunk.vpn();
                let pages = chunk.max(first)..(chunk + CHUNK_PAGES).min(end);
                self.adopt_pages_of_child(child, uffd, pages).map_err(gone)?;
            }
        }
        let space = self.spaces[child].as_mut().expect("as above");
        space.inherited = space.resident;
        Ok(())
    }

    /// Discards pages that the parent had unmapped before it forked.
    fn discard_unmapped(&mut self, child: usize, registered: &[&Mapping]) {
        for chunk in self.tables.chunks_in(child, ALL_PAGES) {
            for key in (0..CHUNK_PAGES).map(|i| chunk.plus(i)) {
                let at = key.address();
                let next = registered.partition_point(|mapping| mapping.start <= at);
                let is_mapped = next > 0 && at < registered[next - 1].end;
                if !is_mapped && self.get(key) != Entry::ZERO {
                    self.discard(key);
                }
            }
        }
    }

    /// The kernel has left this memory of the child's empty, and so it is in the pool.
    fn discard_wiped(&mut self, child: usize, range: Range) {
        let (first, end) = (range.start / PAGE, (range.start + range.len) / PAGE);
        for chunk in self.tables.chunks_in(child, first..end) {
            for vpn in chunk.vpn().max(first)..(chunk.vpn() + CHUNK_PAGES).min(end) {
                self.discard(Key::new(child, vpn));
            }
        }
    }

    /// Compares entries with what is in the child's memory.
    ///
    /// No clean page of the parent's has been written to since its entry was copied, since the
    /// fault was not served; so the child's is clean too, and is protected again.
    fn adopt_pages_of_child(
        &mut self,
        child: usize,
        uffd: Uffd,
        pages: std::ops::Range<u64>,
    ) -> std::io::Result<()> {
        let space = self.spaces[child].as_mut().expect("it has just attached");
        let (stage, pid) = (space.stage, space.pid);
        let mapped = space.mapped(pages.start, (pages.end - pages.start) as usize)?;
        let mut clean: Option<Range> = None;
        for (vpn, mapped) in pages.zip(mapped) {
            let key = Key::new(child, vpn);
            let entry = self.get(key);
            let stays_clean = mapped.present && entry.is_clean_resident();
            match entry.place() {
                _ if stays_clean => {}
                Place::Out | Place::Fetching
                    if mapped.present && self.is_foreign(stage, pid, key.vpn()) =>
                {
                    let why = "it was read from outside, and has zeros in the place of what it had";
                    return Err(std::io::Error::other(why));
                }
                Place::Zero | Place::Out | Place::Fetching if mapped.present => {
                    // It came into the parent's memory before the fork, after the copy.
                    self.set(key, entry.with_place(Place::Resident).with_dirty(true));
                    self.count_in(key, Installed::Demand);
                }
                // The parent freed it.
                Place::Resident if !mapped.present => self.discard(key),
                _ => {}
            }
            match &mut clean {
                Some(run) if stays_clean && run.start + run.len == key.address() => run.len += PAGE,
                _ => {
                    self.protect_again(child, uffd, clean.take());
                    clean = stays_clean.then_some(Range { start: key.address(), len: PAGE });
                }
            }
        }
        self.protect_again(child, uffd, clean);
        Ok(())
    }

    /// Whether a page of zeros in a child did not come from its parent. A process that reads the
    /// memory of a child before it attaches, as a debugger might, finds zeros in the place of pages
    /// that are in the pool, and leaves them there.
    fn is_foreign(&mut self, stage: Stage, pid: Option<i32>, vpn: u64) -> bool {
        let Stage::Forking { parent: Some(parent) } = stage else { return false };
        let parents = self.space(parent).map(|space| space.mapped(vpn, 1));
        if matches!(parents, Some(Ok(pages)) if pages[0].present) {
            return false;
        }
        let mut page = [1u8; PAGE as usize];
        let is_read = pid.is_some_and(|pid| Memory::of(pid).read(vpn * PAGE, &mut page));
        is_read && page.iter().all(|&byte| byte == 0)
    }

    fn protect_again(&mut self, child: usize, uffd: Uffd, clean: Option<Range>) {
        let Some(run) = clean else { return };
        if uffd.protect(run.start, run.len).is_err() {
            for vpn in run.start / PAGE..(run.start + run.len) / PAGE {
                let key = Key::new(child, vpn);
                let entry = self.get(key);
                self.set(key, entry.with_dirty(true));
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::process::guard::Guard;
    use crate::state::State;
    use crate::state::record::Record;
    use std::os::fd::{BorrowedFd, IntoRawFd};
    use std::os::unix::net::UnixStream;

    pub(crate) const PARENT: usize = 0;

    /// One whose other end is closed.
    pub(crate) fn connection() -> RawFd {
        UnixStream::pair().unwrap().0.into_raw_fd()
    }

    /// A pager with one live program, which is this process.
    pub(crate) fn pager() -> Core {
        let fd = State::create().unwrap();
        // SAFETY: just created, never closed.
        let (state, _) = State::open(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap();
        let guard = Guard::new(connection()).unwrap();
        let mut core = Core::new(state, std::sync::Arc::new(guard), 1 << 14);
        let mut space = AddressSpace::new(Uffd(-1), Helper::only_connection(-1));
        space.pid = Some(std::process::id() as i32);
        space.stage = Stage::Live;
        assert_eq!(core.add_space(space), Some(PARENT));
        core
    }

    /// An entry of a page that is in the pool.
    pub(crate) fn put_out(core: &mut Core, key: Key) -> u64 {
        let page = core.pages.allocate(&core.state, key, None);
        core.pages.set_record(&core.state, page, Record::FREE.with_refs(1).with_stored(true));
        core.set(key, Entry::ZERO.with_place(Place::Out).with_space_page(Some(page)));
        page
    }

    #[test]
    fn a_child_shares_what_is_in_the_pool_until_it_ends() {
        let mut core = pager();
        let (out, fetching) = (Key::new(PARENT, 1 << 20), Key::new(PARENT, (1 << 20) + 700));
        let page = put_out(&mut core, out);
        put_out(&mut core, fetching);
        let entry = core.get(fetching);
        core.set(fetching, entry.with_place(Place::Fetching).with_awaited(true));

        let child = core.copy_for_child(PARENT, connection()).unwrap();
        let stage = core.spaces[child].as_ref().unwrap().stage;
        assert_eq!(stage, Stage::Forking { parent: Some(PARENT) });
        assert!(
            core.spaces_that_fork() == [child, PARENT]
                && core.is_forked_from(PARENT)
                && !core.is_forked_from(child)
        );
        assert_eq!(core.pages.record(&core.state, page).refs(), 2);
        let theirs = core.get(Key::new(child, fetching.vpn()));
        assert_eq!((theirs.place(), theirs.is_awaited()), (Place::Out, false));
        let loaded = AddressSpace::load(&core.state, child).unwrap();
        assert_eq!((loaded.stage, loaded.uffd), (stage, Uffd(-1)));

        core.spaces[child].as_mut().unwrap().helper = None;
        core.end_space(child);
        assert!(core.spaces_that_fork().is_empty());
        assert_eq!(core.pages.record(&core.state, page).refs(), 1);
        assert_eq!(core.get(out).place(), Place::Out);
    }

    #[test]
    fn a_parent_that_ends_leaves_its_child() {
        let mut core = pager();
        let page = put_out(&mut core, Key::new(PARENT, 1 << 20));
        let child = core.copy_for_child(PARENT, connection()).unwrap();
        core.spaces[PARENT].as_mut().unwrap().helper = None;
        core.end_space(PARENT);
        let stage = core.spaces[child].as_ref().unwrap().stage;
        assert_eq!(stage, Stage::Forking { parent: None });
        assert_eq!(core.pages.record(&core.state, page).refs(), 1);
    }

    #[test]
    fn what_moved_before_the_fork_moves_in_the_copy() {
        // The child's mappings are this process's: one range is mapped, the other is not.
        let memory = vec![0u8; 1 << 20];
        let mapped = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let (unmapped, len) = (0x10_0000, 4 * PAGE);
        for (from, to, moves) in [(unmapped, mapped, true), (mapped, unmapped, false)] {
            let mut core = pager();
            let page = put_out(&mut core, Key::new(PARENT, from / PAGE + 1));
            let child = core.copy_for_child(PARENT, connection()).unwrap();
            core.spaces[child].as_mut().unwrap().pid = Some(std::process::id() as i32);
            for _ in 0..2 {
                // A message may be acted upon twice.
                core.moved_at_fork(PARENT, from, to, len);
            }
            let at = |core: &mut Core, start: u64| {
                core.get(Key::new(child, start / PAGE + 1)).space_page()
            };
            let expected = if moves { (None, Some(page)) } else { (Some(page), None) };
            assert_eq!((at(&mut core, from), at(&mut core, to)), expected);
        }
    }
}
