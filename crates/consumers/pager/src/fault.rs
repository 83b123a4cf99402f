//! Says what is done about a fault.

pub(crate) mod emptied;
pub(crate) mod event;
pub(crate) mod fetch;

use crate::core::{Core, Fault, Fetch};
use crate::programs::address_space::AddressSpace;
use crate::state::entry::Place;
use crate::state::tables::Key;
use hecaton_memory::{PAGE_SIZE, PageSum, is_zero, page_sum};
use hecaton_policy::evict::Installed;
use hecaton_uffd::abi::UFFDIO_COPY_MODE_WP;
use hecaton_uffd::{Errno, Uffd};

/// Longest run whose write protection is lifted at one write fault.
const MAX_WRITE_RUN: u64 = 64;

const PAGE: u64 = PAGE_SIZE as u64;

const ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// The reason for ending a consumer whose evictor reads a page that is not there. Libc changes no
/// mappings between the evictor's check and the read.
const READ_ELSEWHERE: &str = "memory moved while a page of it was being taken: the program changes \
                              its mappings by system calls of its own, in several threads at once";

/// Memory that the program drops by `MADV_FREE` past libc is missing without a report, too. So the
/// program is not ended.
const UNEXPLAINED_MISSING: &str = "a page was missing that the program has not dropped by any call \
                                   that is reported; it reads zeros there, perhaps wrongly";

impl Core {
    /// Serves a fault, or arranges for what will. Pages to be read are appended to `fetches`.
    pub(crate) fn fault(&mut self, fault: Fault, fetches: &mut Vec<Fetch>) {
        let Fault { key, .. } = fault;
        let Some(space) = self.spaces.get(key.space()).and_then(Option::as_ref) else { return };
        let uffd = space.uffd;
        if space.is_due() {
            self.charge(key.space());
        }
        if !fault.write && !fault.protected && self.own_reads.has(key, fault.thread) {
            return self.serve_evictor(key);
        }
        let entry = self.get(key);
        if entry.is_busy() {
            self.parked.push(key);
            return;
        }
        if fault.protected {
            self.stats.write_protect_faults += 1;
            return self.make_dirty(fault);
        }
        self.stats.faults += 1;
        match entry.place() {
            Place::Zero => self.fill_with_zeros(fault),
            Place::Resident => {
                // Either the fault was answered while its message waited here, or the program frees
                // the page in one thread while it uses it in another, and lost it after it came in.
                let filled = uffd.zero(key.address(), PAGE);
                if filled.error.is_some() {
                    let _ = uffd.wake(key.address(), PAGE);
                } else {
                    self.stats.unexpected_missing += 1;
                    self.set(key, entry.with_dirty(true));
                    self.check_missing(key);
                }
            }
            Place::Fetching => {
                self.stats.late_faults += 1;
                self.set(key, entry.with_awaited(true).with_dirty(entry.is_dirty() || fault.write));
                if self.coming_triggers.remove(&key) {
                    let window = self.prefetcher.on_trigger_hit(fault.thread.into(), key.0);
                    self.prefetch(window, fault.write, fetches);
                }
            }
            Place::Out => self.bring_in(fault, fetches),
        }
    }

    /// Lets the evictor read zeros at a page that the program has just freed. The settling of the
    /// batch discards what was read.
    fn serve_evictor(&mut self, key: Key) {
        if self.get(key).place() != Place::Zero {
            // The program would read zeros instead of its data.
            self.fail(READ_ELSEWHERE.into());
        }
        let Some(space) = self.spaces.get(key.space()).and_then(Option::as_ref) else { return };
        // A thread that writes there waits until the batch is settled: the helper may drop the page
        // before that, and the write with it.
        let mode = if space.protects() { UFFDIO_COPY_MODE_WP } else { 0 };
        let uffd = space.uffd;
        if uffd.copy(key.address(), ZEROS.as_ptr(), PAGE, mode).error.is_some() {
            // The mappings are changing, or it is there already.
            let _ = uffd.wake(key.address(), PAGE);
        } else {
            self.own_reads.filled(key);
        }
    }

    /// Counts the pages that came in for the evictor's sake and are still there. The batch is
    /// settled.
    pub(crate) fn count_own_fills(&mut self) {
        for key in self.own_reads.take_filled() {
            if self.get(key).place() == Place::Zero && self.is_mapped(key) {
                self.now_resident(key, true, Installed::ZeroFill);
            }
        }
    }

    /// The program reads zeros at a page that the table had as resident.
    fn check_missing(&mut self, key: Key) {
        if self.is_guest(key.space()) || self.emptied.may_lack(key) {
            return;
        }
        self.stats.unexplained_missing += 1;
        if self.stats.unexplained_missing == 1 {
            let address = format!("{:#x}", key.address());
            tracing::error!(address, "{UNEXPLAINED_MISSING}");
        }
    }

    /// A write to a page that is mapped write-protected.
    fn make_dirty(&mut self, fault: Fault) {
        let Fault { key, .. } = fault;
        let entry = self.get(key);
        if entry.place() == Place::Out && self.is_mapped(key) {
            // A forked child: it has the page in memory although its parent's was evicted. (Else
            // the page was evicted while this message waited to be read.)
            self.set(key, entry.with_place(Place::Resident).with_dirty(true));
            self.count_in(key, Installed::Rescued);
        }
        let space = self.spaces[key.space()].as_mut().expect("checked by the caller");
        let uffd = space.uffd;
        // A program that writes page after page of what it has read gets ever longer runs.
        let (next, last) = space.write_run;
        let run = if key.vpn() == next { (last * 2).min(MAX_WRITE_RUN) } else { 1 };
        let mut pages = 0;
        while pages < run {
            let entry = self.get(key.plus(pages));
            if pages > 0 && (entry.is_busy() || !entry.is_clean_resident()) {
                break;
            }
            if entry.is_clean_resident() {
                self.set(key.plus(pages), entry.with_dirty(true));
                self.spare_place(key.plus(pages));
                let charged = self.spaces[key.space()].as_ref().is_some_and(|s| s.charged);
                if charged && pages == 0 {
                    self.order.referenced(self.tables.place_of(&self.state, key));
                }
            }
            pages += 1;
        }
        if let Some(space) = self.space(key.space()) {
            space.write_run = (key.vpn() + pages, pages);
        }
        if uffd.unprotect(key.address(), pages * PAGE).is_err() {
            // The mappings are changing, or the run crosses into one that is not ours. The entries
            // stay dirty, which is always safe, and the thread faults again.
            let _ = uffd.wake(key.address(), pages * PAGE);
        }
    }

    /// Whether the page's owner lets us see its next write.
    fn protects(&self, key: Key) -> bool {
        self.spaces[key.space()].as_ref().is_some_and(AddressSpace::protects)
    }

    fn is_mapped(&mut self, key: Key) -> bool {
        let mapped = self.space(key.space()).map(|space| space.mapped(key.vpn(), 1));
        matches!(mapped, Some(Ok(pages)) if pages[0].present)
    }

    /// First touch.
    fn fill_with_zeros(&mut self, fault: Fault) {
        let Fault { key, .. } = fault;
        let room = self.room();
        if room == 0 {
            return self.starve(key);
        }
        self.stats.zero_faults += 1;
        let wanted = u64::from(self.fill_ahead.on_zero_fault(fault.thread.into(), key.0));
        let space = self.spaces[key.space()].as_mut().expect("checked by the caller");
        let uffd = space.uffd;
        let mapped = if wanted > 1 {
            space.mapping_end(key.address()).map_or(1, |end| (end - key.address()) / PAGE)
        } else {
            1
        };
        let most = wanted.min(mapped).min(room);
        let mut pages = 1;
        while pages < most {
            let entry = self.get(key.plus(pages));
            if entry.place() != Place::Zero || entry.is_busy() {
                break;
            }
            pages += 1;
        }
        let mut filled = uffd.zero(key.address(), pages * PAGE);
        if filled.done == 0 && filled.error == Some(Errno(libc::ENOENT)) && pages > 1 {
            // The run crosses mappings that were split since they were read.
            if let Some(space) = self.space(key.space()) {
                space.forget_mappings();
            }
            filled = uffd.zero(key.address(), PAGE);
        }
        for i in 0..filled.done / PAGE {
            self.now_resident(key.plus(i), true, Installed::ZeroFill);
        }
        self.stats.pages_zero_filled += filled.done / PAGE;
        if filled.done == 0 {
            // Present already (EEXIST: mapped before it was registered), or the mappings are
            // changing (EAGAIN): after the wake the access succeeds or faults again.
            if filled.error == Some(Errno(libc::EEXIST)) {
                self.now_resident(key, true, Installed::ZeroFill);
            }
            let _ = uffd.wake(key.address(), PAGE);
        }
        self.local_latency.record(fault.read_at.elapsed());
    }

    fn now_resident(&mut self, key: Key, dirty: bool, how: Installed) {
        let entry = self.get(key);
        let entry = entry.with_place(Place::Resident).with_awaited(false).with_dirty(dirty);
        self.set(key, entry);
        if dirty {
            self.spare_place(key);
        }
        self.count_in(key, how);
    }

    fn starve(&mut self, key: Key) {
        self.stats.starved_faults += 1;
        self.starved.push_back(key);
    }

    /// A page whose contents are staged or at a donor.
    fn bring_in(&mut self, fault: Fault, fetches: &mut Vec<Fetch>) {
        let Fault { key, .. } = fault;
        if self.room() == 0 {
            return self.starve(key);
        }
        let entry = self.get(key);
        let page = entry.space_page().expect("a page that is out has a space page");
        let record = self.pages.record(&self.state, page);
        let thread = u64::from(fault.thread);
        let Some(slot) = record.slot() else {
            self.stats.pool_faults += 1;
            let tag = self.new_tag();
            let stamp = entry.tag();
            let entry = entry.with_place(Place::Fetching).with_tag(tag).with_awaited(true);
            self.set(key, entry.with_dirty(fault.write));
            self.fetching += 1;
            fetches.push(Fetch {
                tag,
                keys: vec![key],
                pages: vec![page],
                demanded_at: Some(fault.read_at),
                stamps: vec![stamp],
                trigger: None,
                write: fault.write,
                avoid: Vec::new(),
            });
            let window = self.prefetcher.on_fault(thread, key.0);
            return self.prefetch(window, fault.write, fetches);
        };
        self.stats.staging_faults += 1;
        let source = self.state.slot(slot);
        let uffd = self.spaces[key.space()].as_ref().expect("checked by the caller").uffd;
        let writable = fault.write || !self.protects(key) || self.is_at_target();
        let mode = if writable { 0 } else { UFFDIO_COPY_MODE_WP };
        let followed = self.triggers.remove(&slot).is_some();
        let how = if followed {
            Installed::PrefetchedAgain { distance: self.clock.distance(entry.tag()) }
        } else {
            Installed::Rescued
        };
        let copied = uffd.copy(key.address(), source, PAGE, mode);
        match copied.error {
            None => self.now_resident(key, writable, how),
            Some(Errno(libc::EEXIST)) => {
                self.now_resident(key, true, how);
                let_write(uffd, key);
            }
            Some(_) => {
                let _ = uffd.wake(key.address(), PAGE);
            }
        }
        self.local_latency.record(fault.read_at.elapsed());
        let window = if followed {
            self.prefetcher.on_trigger_hit(thread, key.0)
        } else {
            self.prefetcher.on_fault(thread, key.0)
        };
        self.prefetch(window, fault.write, fetches);
    }
}

/// The page is there and may be written to; whoever waits for it goes on.
fn let_write(uffd: Uffd, key: Key) {
    if uffd.unprotect(key.address(), PAGE).is_err() {
        // Not registered for protection, or the mappings are changing.
        let _ = uffd.wake(key.address(), PAGE);
    }
}

/// How a page's contents are kept when the page is evicted.
pub(crate) enum Content {
    /// All zero: nothing to keep.
    Zero,
    /// To be stored, with this sum.
    Sum(PageSum),
}

/// Looks at a page that was copied out of the program.
pub(crate) fn examine(page: &[u8]) -> Content {
    if is_zero(page) { Content::Zero } else { Content::Sum(page_sum(page)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::OnLoss;
    use crate::evict::own_reads::OwnReads;
    use crate::programs::inherit::tests::{PARENT, pager, put_out};
    use std::time::Instant;

    #[test]
    fn missing_page_is_explained_by_a_report_alone() {
        let mut core = pager();
        let (freed, kept) = (Key::new(PARENT, 5), Key::new(PARENT, 5000));
        core.removed(PARENT, freed.address(), freed.address() + 3 * PAGE);
        core.check_missing(freed);
        assert_eq!(core.stats.unexplained_missing, 0);
        core.check_missing(kept);
        assert_eq!((core.stats.unexplained_missing, core.failed), (1, None));
    }

    /// Serves a fault whose thread has the evictor's number. Returns the pager's failure, and how
    /// many pages are fetched.
    fn fault(is_in_pool: bool, is_being_read: bool) -> (Option<String>, usize) {
        let mut core = pager();
        core.on_loss = OnLoss::Report;
        core.own_reads = OwnReads::of_this_thread();
        let key = Key::new(PARENT, 1 << 20);
        if is_in_pool {
            put_out(&mut core, key);
        }
        core.own_reads.begin([if is_being_read { key } else { key.plus(1) }]);
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let (write, protected, read_at) = (false, false, Instant::now());
        let mut fetches = Vec::new();
        core.fault(Fault { key, write, protected, thread, read_at }, &mut fetches);
        assert_eq!(core.stats.faults, u64::from(!is_being_read), "it is a program's fault");
        (core.failed, fetches.len())
    }

    #[test]
    fn the_evictor_is_given_zeros_only_for_what_is_zero() {
        assert_eq!(fault(false, true), (None, 0));
        assert_eq!(fault(true, true), (Some(READ_ELSEWHERE.to_owned()), 0));
    }

    #[test]
    fn a_containers_thread_may_have_the_evictors_number() {
        assert_eq!(fault(false, false), (None, 0));
        assert_eq!(fault(true, false), (None, 1), "the page is fetched");
    }
}
