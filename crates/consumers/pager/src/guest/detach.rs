//! A machine leaves the pool while it runs: all of its pages come home, then its memory is not
//! handled by anybody any more.
//!
//! The limit is lifted first, so that nothing is evicted meanwhile; faults are served as ever. The
//! fault loop asks for what is out, a few requests at a time, scan after scan until one finds
//! nothing. That a detach is under way is in the state file: a successor goes on with it.

use crate::core::{Core, Fetch};
use crate::state::entry::Place;
use crate::state::tables::{ALL_PAGES, Key};
use crate::state::{CHUNK_PAGES, Flag};
use hecaton_memory::{PAGE_SIZE, pages_for_bytes, pages_to_bytes};
use hecaton_policy::evict::Installed;
use hecaton_uffd::Errno;

const PAGE: u64 = PAGE_SIZE as u64;

/// Pages beyond the machine's memory that the limit is lifted by: more than any reserve.
const HEADROOM: u64 = 16 << 10;

/// Chunks that are looked at under one hold of the lock.
const CHUNKS_AT_ONCE: usize = 4;

/// Requests for pages under way at a time.
pub(crate) const MAX_REQUESTS: usize = 8;

/// How far a detach is.
#[derive(Debug, Default)]
pub(crate) struct Detach {
    /// Chunks that this scan has yet to look at.
    chunks: Vec<Key>,
    /// Whether this scan has found a page that was not home.
    found: bool,
}

/// Next action of the fault loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// Pages have been asked for, or there are more to look at.
    UnderWay,
    /// Nothing more to ask for until what is under way has come.
    Waiting,
    /// Every page is home.
    Done,
}

impl Core {
    /// Begins to bring the machine's pages home.
    ///
    /// # Errors
    /// When there is no machine, or the host has no room for it: said for people.
    pub(crate) fn begin_detach(&mut self, available_bytes: u64) -> Result<(), String> {
        let guest = self.live_spaces().find_map(|(_, space)| space.guest.as_ref());
        let Some(ram) = guest else { return Err("no machine is attached".into()) };
        let bytes = ram.bytes();
        let out = pages_to_bytes(self.pages.in_use());
        if out > available_bytes {
            return Err(format!(
                "{out} bytes of the machine are in the pool, and this host has {available_bytes} \
                 available; free some, or stop other machines"
            ));
        }
        self.resize(pages_for_bytes(bytes) + HEADROOM);
        self.state.note(Flag::Detaching, true);
        self.detach.get_or_insert_default();
        Ok(())
    }

    /// Asks for pages that are not home. `idle`: nothing is under way.
    pub(crate) fn bring_home(&mut self, idle: bool, fetches: &mut Vec<Fetch>) -> Progress {
        let guest = self.live_spaces().find(|(_, space)| space.guest.is_some());
        let (Some(index), Some(mut detach)) = (guest.map(|(i, _)| i), self.detach.take()) else {
            return Progress::Waiting;
        };
        if detach.chunks.is_empty() {
            if !idle {
                self.detach = Some(detach);
                return Progress::Waiting;
            }
            detach = Detach { chunks: self.tables.chunks_in(index, ALL_PAGES), found: false };
        }
        for _ in 0..CHUNKS_AT_ONCE {
            let Some(first) = detach.chunks.pop() else { break };
            detach.found |= self.bring_chunk_home(first, fetches);
        }
        let done = detach.chunks.is_empty() && !detach.found && self.batch.is_empty();
        self.detach = Some(detach);
        if done { Progress::Done } else { Progress::UnderWay }
    }

    /// True if a page of the chunk is not home yet.
    fn bring_chunk_home(&mut self, first: Key, fetches: &mut Vec<Fetch>) -> bool {
        let mut away = false;
        for key in (0..CHUNK_PAGES).map(|i| first.plus(i)) {
            let entry = self.get(key);
            away |= entry.is_busy() || matches!(entry.place(), Place::Out | Place::Fetching);
            if entry.place() != Place::Out || entry.is_busy() {
                continue;
            }
            let page = entry.space_page().expect("a page that is out has a space page");
            if let Some(slot) = self.pages.record(&self.state, page).slot() {
                self.bring_staged_home(key, slot);
                continue;
            }
            self.fetch_ahead(key, page, true, fetches, 0);
        }
        away
    }

    fn bring_staged_home(&mut self, key: Key, slot: u32) {
        let Some(uffd) = self.uffd(key.space()) else { return };
        let copied = uffd.copy(key.address(), self.state.slot(slot), PAGE, 0);
        if copied.error.is_none() || copied.error == Some(Errno(libc::EEXIST)) {
            let entry = self.get(key).with_place(Place::Resident).with_awaited(false);
            self.set(key, entry.with_dirty(true));
            self.count_in(key, Installed::Rescued);
        }
    }

    /// Every page is home: lets go of the machine's memory.
    pub(crate) fn finish_detach(&mut self) {
        let guest = self.live_spaces().find(|(_, space)| space.guest.is_some());
        let Some((index, space)) = guest else { return };
        for span in space.guest.iter().flat_map(|ram| ram.spans()) {
            // Lifts all write protection, and wakes whoever waits. An error means that the mapping
            // has gone this moment.
            let _ = space.uffd.unregister(span.start, span.len);
        }
        if let Some(socket) = space.connection() {
            super::handover::say_detached(socket);
        }
        tracing::info!("the machine is detached, with all of its memory local");
        self.detach = None;
        self.end_space(index);
        self.state.note(Flag::Detaching, false);
    }
}
