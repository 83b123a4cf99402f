//! One program's (or forked child's, or hypervisor's) memory: its userfaultfd, its helper, its
//! mappings.

use crate::guest::{FilePlace, Ram};
use crate::process::guard::{helper_label, uffd_label};
use crate::programs::helper::Helper;
use crate::programs::mappings::read_mappings;
use crate::programs::stage::Stage;
use crate::state::{SPACE_WORDS, State};
use hecaton_uffd::Uffd;
use hecaton_uffd::handover::Range;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::File;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::{Duration, Instant};

/// An address space that is paged.
pub(crate) struct AddressSpace {
    pub(crate) stage: Stage,
    /// -1 for a child that has not attached.
    pub(crate) uffd: Uffd,
    /// Unknown for a child that has not said anything.
    pub(crate) pid: Option<i32>,
    /// The connection is there from the start, the thread at its end once the space is live.
    pub(crate) helper: Option<Helper>,
    /// Guest RAM of a hypervisor; only this part of a hypervisor is paged.
    pub(crate) guest: Option<Ram>,
    /// Pages in its memory.
    pub(crate) resident: u64,
    /// Pages that a forked child had in memory from its parent.
    pub(crate) inherited: u64,
    /// When it came.
    pub(crate) since: Instant,
    /// Whether `resident` counts against the consumer's local memory: a child that is about to
    /// call exec shares its pages with its parent and is not worth evicting anything for.
    pub(crate) charged: bool,
    /// See [`crate::programs::helper_loss`].
    pub(crate) helper_lost: bool,
    /// It has ended; torn down as soon as no eviction batch names it.
    pub(crate) gone: bool,
    /// No other address space of this consumer has, had or will have it.
    pub(crate) serial: u64,
    /// Where the last run of write-protect faults would go on, and how long it was.
    pub(crate) write_run: (u64, u64),
    /// Mappings, as last read; checked by [`AddressSpace::mapping_end`].
    mappings: Vec<(u64, u64)>,
    /// Address ranges known to be registered, sorted and apart from each other.
    registered: Vec<(u64, u64)>,
    pagemap: Option<File>,
}

/// Result of [`AddressSpace::renumber`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Renumbered {
    /// There is no address space.
    Nothing,
    /// It can go on.
    Found,
    /// It was never ready; the peer that waited for it asks again.
    NeverRan,
    /// A program may have run on it, and its userfaultfd is gone.
    Lost,
}

/// A forked child that lives longer, or brings in more pages of its own, counts.
const GRACE: Duration = Duration::from_millis(100);
const GRACE_PAGES: u64 = 64;

/// Meanwhile its parent's faults are not served.
const CHILD_PATIENCE: Duration = Duration::from_secs(10);

/// `/proc/PID/pagemap`: the page is in memory.
const PAGEMAP_PRESENT: u64 = 1 << 63;
/// The page is write-protected through userfaultfd.
const PAGEMAP_UFFD_WP: u64 = 1 << 57;
/// No other process maps the page.
const PAGEMAP_EXCLUSIVE: u64 = 1 << 56;

/// The kernel's view of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapped {
    pub(crate) present: bool,
    /// Unknown of a page in a memory file.
    pub(crate) protected: Option<bool>,
    /// No other process maps it. Unknown, and false, of a page in a memory file.
    pub(crate) exclusive: bool,
}

impl AddressSpace {
    pub(crate) fn new(uffd: Uffd, helper: Helper) -> AddressSpace {
        AddressSpace {
            stage: Stage::Preparing,
            uffd,
            pid: None,
            helper: Some(helper),
            guest: None,
            resident: 0,
            inherited: 0,
            since: Instant::now(),
            charged: false,
            helper_lost: false,
            gone: false,
            serial: 0,
            write_run: (0, 0),
            mappings: Vec::new(),
            registered: Vec::new(),
            pagemap: None,
        }
    }

    /// A hypervisor, of which guest RAM is paged. There is no helper in it.
    pub(crate) fn hypervisor(uffd: Uffd, pid: i32) -> AddressSpace {
        let mut space = AddressSpace::new(uffd, Helper::NONE);
        space.stage = Stage::Live;
        space.pid = Some(pid);
        space.helper = None;
        space.charged = true;
        space
    }

    /// Whether a forked child has lived long enough, or grown enough, to be worth evicting for.
    pub(crate) fn is_due(&self) -> bool {
        let settled = self.since.elapsed() > GRACE || self.resident > self.inherited + GRACE_PAGES;
        !self.charged && self.stage == Stage::Live && settled
    }

    /// Whether it was forked, or was about to be, and nothing has come of it for too long: stopped
    /// by somebody, most likely.
    pub(crate) fn is_late_child(&self) -> bool {
        matches!(self.stage, Stage::Forking { .. }) && self.since.elapsed() > CHILD_PATIENCE
    }

    /// The next stage, written down.
    pub(crate) fn advance(&mut self, state: &State, index: usize, stage: Stage) {
        self.stage = stage;
        self.save(state, index);
    }

    /// Ends its process. The helper does it when its connection ends, because the process's number
    /// may be another's by now; so does a child that has not attached.
    pub(crate) fn kill(&self) {
        if self.guest.is_some() {
            return self.kill_hypervisor();
        }
        let Some(helper) = self.helper else { return };
        // SAFETY: the descriptor is open as long as the address space is known.
        unsafe { libc::shutdown(helper.socket, libc::SHUT_RDWR) };
    }

    fn kill_hypervisor(&self) {
        let Some(pid) = self.pid.and_then(Pid::from_raw) else { return };
        // The number may be another process's by now; but not if the memory is still there after it
        // was looked up.
        if let Ok(process) = pidfd_open(pid, PidfdFlags::empty())
            && !self.has_ended()
        {
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
    }

    /// Whether the program runs, or the guest: it is neither being made nor to be welcomed.
    pub(crate) fn is_under_way(&self) -> bool {
        self.guest.is_some() || self.stage == Stage::Live
    }

    /// Whether the pager can take the page at `address` away.
    pub(crate) fn can_give_up(&self, address: u64) -> bool {
        match &self.guest {
            Some(ram) => ram.place(address).is_some(),
            None => self.is_under_way(),
        }
    }

    /// The places of pages in memory files, for guest RAM.
    pub(crate) fn file_places(
        &self,
        addresses: impl Iterator<Item = u64>,
    ) -> Option<Vec<Option<FilePlace>>> {
        let ram = self.guest.as_ref()?;
        Some(addresses.map(|address| ram.place(address)).collect())
    }

    /// Whether pages can be mapped write-protected, so that a later write shows.
    pub(crate) fn protects(&self) -> bool {
        self.guest.as_ref().is_none_or(Ram::protects)
    }

    /// The connection whose end tells that the address space may be gone.
    pub(crate) fn connection(&self) -> Option<RawFd> {
        match &self.guest {
            Some(ram) => ram.socket,
            None => self.helper.map(|helper| helper.socket),
        }
    }

    /// Every descriptor of the address space, with the label under which the node holds it.
    pub(crate) fn held(&self) -> Vec<(String, RawFd)> {
        let uffd = Some(self.uffd.0).filter(|&fd| fd >= 0).map(|fd| (uffd_label(self.serial), fd));
        let connection = self.connection().map(|fd| (helper_label(self.serial), fd));
        let files = self.guest.as_ref().map(Ram::held).unwrap_or_default();
        uffd.into_iter().chain(connection).chain(files).collect()
    }

    /// Whether the process has given up its memory.
    pub(crate) fn has_ended(&self) -> bool {
        self.uffd.has_lost_memory()
    }

    /// Writes down what a successor needs.
    pub(crate) fn save(&self, state: &State, index: usize) {
        let words = &state.spaces[index * SPACE_WORDS..][..SPACE_WORDS];
        let helper = self.helper.unwrap_or(Helper::NONE);
        let socket = self.connection().unwrap_or(-1);
        words[1].store((socket + 1) as u64, Relaxed);
        words[2].store(helper.area, Relaxed);
        words[3].store(helper.own.start, Relaxed);
        words[4].store(helper.own.len, Relaxed);
        words[5].store(self.pid.unwrap_or(0) as u64, Relaxed);
        words[6].store(u64::from(self.charged), Relaxed);
        words[7].store((self.uffd.0 + 1) as u64, Relaxed);
        words[8].store(helper.left_alone, Relaxed);
        words[9].store(helper.left_alone_count as u64, Relaxed);
        words[10].store(self.serial, Relaxed);
        words[11].store(u64::from(self.guest.is_some()), Relaxed);
        words[0].store(self.stage.to_word() + 1, Release);
    }

    /// The address space that a predecessor wrote down at `index`.
    pub(crate) fn load(state: &State, index: usize) -> Option<AddressSpace> {
        let words = &state.spaces[index * SPACE_WORDS..][..SPACE_WORDS];
        let word = |i: usize| words[i].load(Relaxed);
        let stage = Stage::from_word(word(0).checked_sub(1)?);
        let socket = word(1) as RawFd - 1;
        let helper = Helper {
            socket,
            area: word(2),
            own: Range { start: word(3), len: word(4) },
            left_alone: word(8),
            left_alone_count: word(9) as usize,
        };
        let mut space = AddressSpace::new(Uffd(word(7) as RawFd - 1), helper);
        space.helper = space.helper.filter(|helper| helper.socket >= 0);
        if word(11) != 0 {
            space.helper = None;
            space.guest = Some(Ram::load(state, index, Some(socket).filter(|&fd| fd >= 0)));
        }
        space.stage = stage;
        space.pid = Some(word(5) as i32).filter(|&pid| pid != 0);
        space.charged = word(6) != 0;
        space.serial = word(10);
        Some(space)
    }

    /// The descriptors of the address space at `index` have other numbers now: `numbers` gives
    /// userfaultfd and helper's connection by the serial number, as far as they are still held.
    pub(crate) fn renumber(
        state: &State,
        index: usize,
        numbers: impl FnOnce(u64) -> (Option<RawFd>, Option<RawFd>),
    ) -> Renumbered {
        let words = &state.spaces[index * SPACE_WORDS..][..SPACE_WORDS];
        let Some(stage) = words[0].load(Relaxed).checked_sub(1) else { return Renumbered::Nothing };
        let (uffd, helper) = numbers(words[10].load(Relaxed));
        let is_held = match Stage::from_word(stage) {
            Stage::Preparing => false,
            Stage::Forking { .. } => helper.is_some(),
            Stage::Welcoming | Stage::Live => uffd.is_some() && helper.is_some(),
        };
        if !is_held {
            // To be torn down, as one whose preparation was cut short.
            words[0].store(Stage::Preparing.to_word() + 1, Release);
            words[1].store(0, Relaxed);
            words[7].store(0, Relaxed);
            return match Stage::from_word(stage) {
                Stage::Preparing | Stage::Forking { .. } => Renumbered::NeverRan,
                Stage::Welcoming | Stage::Live => Renumbered::Lost,
            };
        }
        words[1].store(helper.map_or(0, |fd| fd as u64 + 1), Relaxed);
        if !matches!(Stage::from_word(stage), Stage::Forking { .. }) {
            words[7].store(uffd.map_or(0, |fd| fd as u64 + 1), Relaxed);
        }
        Renumbered::Found
    }

    /// The place at `index` may be used again.
    pub(crate) fn erase(state: &State, index: usize) {
        state.spaces[index * SPACE_WORDS].store(0, Release);
    }

    /// The end of the mapping that holds `address`, if it is known to the kernel; at most what was
    /// true a moment ago.
    pub(crate) fn mapping_end(&mut self, address: u64) -> Option<u64> {
        if let Some(ram) = &self.guest {
            return ram.region_end(address);
        }
        let find = |mappings: &[(u64, u64)]| {
            let next = mappings.partition_point(|&(start, _)| start <= address);
            let (_, end) = *mappings.get(next.checked_sub(1)?)?;
            (address < end).then_some(end)
        };
        if let Some(end) = find(&self.mappings) {
            return Some(end);
        }
        self.mappings = read_mappings(self.pid?)
            .map(|mappings| mappings.into_iter().map(|m| (m.start, m.end)).collect())
            .unwrap_or_default();
        find(&self.mappings)
    }

    /// Drops the mappings as last read, because they may be outdated.
    pub(crate) fn forget_mappings(&mut self) {
        self.mappings.clear();
    }

    /// The part of `[start, end)` behind what is known to be registered.
    pub(crate) fn unregistered_part(&self, start: u64, end: u64) -> Option<Range> {
        let next = self.registered.partition_point(|&(from, _)| from <= start);
        let known = next.checked_sub(1).map_or(start, |i| self.registered[i].1.max(start));
        (known < end).then(|| Range { start: known, len: end - known })
    }

    /// The range is registered.
    pub(crate) fn remember_registered(&mut self, range: Range) {
        let (mut start, mut end) = (range.start, range.start + range.len);
        self.registered.retain(|&(from, to)| {
            let touches = from <= end && start <= to;
            if touches {
                (start, end) = (start.min(from), end.max(to));
            }
            !touches
        });
        let at = self.registered.partition_point(|&(from, _)| from < start);
        self.registered.insert(at, (start, end));
    }

    /// The range is not mapped any more.
    pub(crate) fn forget_registered(&mut self, start: u64, end: u64) {
        let mut kept = Vec::with_capacity(self.registered.len() + 1);
        for &(from, to) in &self.registered {
            if from < start.min(to) {
                kept.push((from, to.min(start)));
            }
            if end.max(from) < to {
                kept.push((from.max(end), to));
            }
        }
        self.registered = kept;
    }

    /// Reads the state of `count` pages from `vpn` on from the kernel. An error means that the
    /// process has ended.
    pub(crate) fn mapped(&mut self, vpn: u64, count: usize) -> std::io::Result<Vec<Mapped>> {
        if let Some(ram) = self.guest.as_ref().filter(|ram| ram.has_files()) {
            return ram.mapped(vpn, count);
        }
        if self.pagemap.is_none() {
            let pid = self.pid.ok_or(std::io::ErrorKind::NotFound)?;
            self.pagemap = Some(File::open(format!("/proc/{pid}/pagemap"))?);
        }
        let file = self.pagemap.as_ref().expect("just opened");
        let mut bytes = vec![0u8; count * 8];
        file.read_exact_at(&mut bytes, vpn * 8)?;
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        Ok(words
            .map(|word| Mapped {
                present: word & PAGEMAP_PRESENT != 0,
                protected: Some(word & PAGEMAP_UFFD_WP != 0),
                exclusive: word & PAGEMAP_EXCLUSIVE != 0,
            })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::MAX_SPACES;
    use std::os::fd::BorrowedFd;

    const HELPER: Helper = Helper {
        socket: 8,
        area: 0x7000,
        own: Range { start: 0x5000, len: 0x4000 },
        left_alone: 0x6000,
        left_alone_count: 3,
    };

    #[test]
    fn a_successor_reads_every_stage() {
        let fd = State::create().unwrap();
        // SAFETY: just created, never closed.
        let (state, _) = State::open(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap();
        let stages = [
            Stage::Preparing,
            Stage::Forking { parent: Some(MAX_SPACES - 1) },
            Stage::Forking { parent: None },
            Stage::Welcoming,
            Stage::Live,
        ];
        for (index, stage) in stages.into_iter().enumerate() {
            let uffd = Uffd(if matches!(stage, Stage::Forking { .. }) { -1 } else { 9 });
            let mut space = AddressSpace::new(uffd, HELPER);
            space.pid = (index % 2 == 0).then_some(77);
            space.advance(&state, index, stage);
            let loaded = AddressSpace::load(&state, index).unwrap();
            assert_eq!((loaded.stage, loaded.uffd, loaded.pid), (stage, uffd, space.pid));
            assert_eq!(loaded.helper, Some(HELPER));
        }
        AddressSpace::erase(&state, 0);
        assert!(AddressSpace::load(&state, 0).is_none());
    }

    #[test]
    fn remembers_what_is_registered() {
        let mut space = AddressSpace::new(Uffd(-1), HELPER);
        let range = |start, end| Range { start, len: end - start };
        assert_eq!(space.unregistered_part(10, 20), Some(range(10, 20)));
        space.remember_registered(range(10, 20));
        space.remember_registered(range(40, 50));
        assert_eq!(space.unregistered_part(10, 20), None);
        assert_eq!(space.unregistered_part(12, 15), None);
        assert_eq!(space.unregistered_part(10, 30), Some(range(20, 30)));
        space.remember_registered(range(20, 40));
        assert_eq!(space.registered, [(10, 50)]);
        space.forget_registered(20, 30);
        assert_eq!(space.registered, [(10, 20), (30, 50)]);
        space.forget_registered(0, 15);
        space.forget_registered(45, 90);
        assert_eq!(space.registered, [(15, 20), (30, 45)]);
    }

    #[test]
    fn sees_its_own_pages() {
        let memory = vec![1u8; 64 << 10];
        let mut space = AddressSpace::new(Uffd(-1), HELPER);
        space.pid = Some(std::process::id() as i32);
        let vpn = memory.as_ptr() as u64 / 4096 + 1;
        let pages = space.mapped(vpn, 4).unwrap();
        assert!(pages.iter().all(|page| page.present && page.protected == Some(false)));
        let end = space.mapping_end(memory.as_ptr() as u64).unwrap();
        assert!(end >= memory.as_ptr() as u64 + (64 << 10));
    }
}
