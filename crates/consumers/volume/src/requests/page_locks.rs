//! Locks the pages of a volume for requests.
//!
//! A request locks all of its pages at once, in the order of arrival. So no lock holder waits for
//! another lock, and no request starves. If a holder waits for an unreachable donor, its lock is
//! *stuck*: a request for the same pages is refused, and does not wait.

use hecaton_memory::PageNo;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Whether other requests may use the same pages at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Other requests may read them.
    Shared,
    /// No other request may use them.
    Exclusive,
}

/// A request that waits for an unreachable donor holds the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stuck;

/// All locks of a volume.
#[derive(Debug, Default)]
pub(crate) struct PageLocks {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    taken: u64,
    /// Threads that wait for a change of the table.
    waiting: usize,
    /// Holders and waiters in the order of arrival: as many as requests are in flight.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    ticket: u64,
    pages: Range<PageNo>,
    /// If set, the lock is for these pages of the range only; sorted.
    these: Option<Vec<PageNo>>,
    access: Access,
    is_stuck: bool,
}

impl Entry {
    fn shares_pages(&self, other: &Entry) -> bool {
        if self.pages.start >= other.pages.end || other.pages.start >= self.pages.end {
            return false;
        }
        match (&self.these, &other.these) {
            (None, None) => true,
            (Some(these), None) => has_any(these, &other.pages),
            (None, Some(these)) => has_any(these, &self.pages),
            (Some(these), Some(those)) => {
                these.iter().any(|page| those.binary_search(page).is_ok())
            }
        }
    }
}

fn has_any(sorted: &[PageNo], pages: &Range<PageNo>) -> bool {
    let first = sorted.partition_point(|page| *page < pages.start);
    sorted.get(first).is_some_and(|page| *page < pages.end)
}

/// A lock that is held until the value is dropped.
#[derive(Debug)]
pub(crate) struct PageLock {
    locks: Arc<PageLocks>,
    ticket: u64,
}

impl PageLocks {
    /// Waits until no earlier request with a conflicting access holds, or waits for, any of the
    /// pages. Refused if such a request is stuck.
    pub(crate) fn lock(
        self: &Arc<Self>,
        pages: Range<PageNo>,
        access: Access,
    ) -> Result<PageLock, Stuck> {
        self.enter(pages, None, access)
    }

    /// Like [`PageLocks::lock`], for sorted pages that need not be adjacent. It locks all of them
    /// at once, so that no lock holder waits for another lock.
    pub(crate) fn lock_these(
        self: &Arc<Self>,
        pages: Vec<PageNo>,
        access: Access,
    ) -> Result<PageLock, Stuck> {
        let start = pages.first().copied().unwrap_or_default();
        let end = pages.last().map_or(start, |last| last + 1);
        self.enter(start..end, Some(pages), access)
    }

    /// Like [`PageLocks::lock`], but returns `None` where that would wait or be refused.
    pub(crate) fn try_lock(
        self: &Arc<Self>,
        pages: Range<PageNo>,
        access: Access,
    ) -> Option<PageLock> {
        let mut table = self.table();
        let ticket = table.enter(pages, None, access);
        if table.ahead_of(ticket) != Ahead::Nobody {
            table.entries.pop();
            return None;
        }
        Some(PageLock { locks: Arc::clone(self), ticket })
    }

    /// Whether a request has the page exclusively, or waits to.
    pub(crate) fn is_exclusive(&self, page: PageNo) -> bool {
        let has = |entry: &Entry| match &entry.these {
            Some(these) => these.binary_search(&page).is_ok(),
            None => entry.pages.contains(&page),
        };
        self.table().entries.iter().any(|entry| entry.access == Access::Exclusive && has(entry))
    }

    fn enter(
        self: &Arc<Self>,
        pages: Range<PageNo>,
        these: Option<Vec<PageNo>>,
        access: Access,
    ) -> Result<PageLock, Stuck> {
        let mut table = self.table();
        let ticket = table.enter(pages, these, access);
        // From here on, a drop of `lock` removes the entry.
        let lock = PageLock { locks: Arc::clone(self), ticket };
        loop {
            match table.ahead_of(ticket) {
                Ahead::Nobody => return Ok(lock),
                Ahead::Somebody => {
                    table.waiting += 1;
                    table = self.changed.wait(table).expect("no thread panics with the locks");
                    table.waiting -= 1;
                }
                Ahead::Stuck => {
                    // The drop of `lock` locks the table again.
                    drop(table);
                    return Err(Stuck);
                }
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no thread panics with the locks")
    }
}

/// Earlier requests that conflict with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ahead {
    Nobody,
    Somebody,
    Stuck,
}

impl Table {
    fn enter(&mut self, pages: Range<PageNo>, these: Option<Vec<PageNo>>, access: Access) -> u64 {
        let ticket = self.taken;
        self.taken += 1;
        self.entries.push(Entry { ticket, pages, these, access, is_stuck: false });
        ticket
    }

    fn ahead_of(&self, ticket: u64) -> Ahead {
        let (earlier, rest) = self.entries.split_at(self.at(ticket));
        let own = &rest[0];
        let keeps_out = |entry: &&Entry| {
            entry.shares_pages(own)
                && (entry.access == Access::Exclusive || own.access == Access::Exclusive)
        };
        let mut ahead = Ahead::Nobody;
        for entry in earlier.iter().filter(keeps_out) {
            if entry.is_stuck {
                return Ahead::Stuck;
            }
            ahead = Ahead::Somebody;
        }
        ahead
    }

    fn at(&self, ticket: u64) -> usize {
        self.entries.binary_search_by_key(&ticket, |entry| entry.ticket).expect("it is entered")
    }
}

impl PageLock {
    /// Refuses requests that want any of the pages from now on.
    pub(crate) fn set_stuck(&self) {
        let mut table = self.locks.table();
        let at = table.at(self.ticket);
        table.entries[at].is_stuck = true;
        self.locks.changed.notify_all();
    }
}

impl Drop for PageLock {
    fn drop(&mut self) {
        let mut table = self.locks.table();
        let at = table.at(self.ticket);
        table.entries.remove(at);
        // A wake-up without a waiter is a system call, too.
        if table.waiting > 0 {
            self.locks.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;

    #[test]
    fn readers_share_and_writers_do_not() {
        let locks = Arc::new(PageLocks::default());
        let writers = AtomicU32::new(0);
        let readers = AtomicU32::new(0);
        thread::scope(|scope| {
            for thread in 0..4u64 {
                let (locks, writers, readers) = (&locks, &writers, &readers);
                scope.spawn(move || {
                    for turn in 0..500 {
                        // All of the ranges contain page 3.
                        let pages = 3 - (thread + turn) % 4..4 + turn % 3;
                        if turn % 3 == 0 {
                            let _lock = locks.lock(pages, Access::Exclusive).unwrap();
                            assert_eq!(writers.fetch_add(1, Ordering::SeqCst), 0);
                            assert_eq!(readers.load(Ordering::SeqCst), 0);
                            writers.fetch_sub(1, Ordering::SeqCst);
                        } else {
                            let _lock = locks.lock(pages, Access::Shared).unwrap();
                            readers.fetch_add(1, Ordering::SeqCst);
                            assert_eq!(writers.load(Ordering::SeqCst), 0);
                            readers.fetch_sub(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert!(locks.table().entries.is_empty());
    }

    #[test]
    fn two_readers_and_two_apart_hold_their_locks_at_once() {
        let locks = Arc::new(PageLocks::default());
        let _held = [
            locks.lock(0..4, Access::Shared),
            locks.lock(3..5, Access::Shared),
            locks.lock(5..9, Access::Exclusive),
        ]
        .map(Result::unwrap);
    }

    #[test]
    fn pages_apart_are_locked_and_none_between_them() {
        let locks = Arc::new(PageLocks::default());
        let held = locks.lock_these(vec![3, 7, 20], Access::Exclusive).unwrap();
        let _beside = locks.lock(4..7, Access::Exclusive).unwrap();
        let _others = locks.lock_these(vec![2, 8, 19], Access::Exclusive).unwrap();
        held.set_stuck();
        assert!(locks.lock(20..30, Access::Shared).is_err());
        assert!(locks.lock(0..4, Access::Shared).is_err());
        assert!(locks.lock_these(vec![1, 7], Access::Shared).is_err());
        assert!(locks.lock(9..19, Access::Shared).is_ok());
    }

    #[test]
    fn who_waits_for_one_that_becomes_stuck_is_refused() {
        let locks = Arc::new(PageLocks::default());
        let held = locks.lock(0..4, Access::Exclusive).unwrap();
        let (refused, refusals) = channel();
        thread::scope(|scope| {
            for pages in [0..1, 3..9] {
                let (locks, refused) = (&locks, refused.clone());
                scope.spawn(move || refused.send(locks.lock(pages, Access::Shared).err()));
            }
            held.set_stuck();
            assert_eq!([(); 2].map(|()| refusals.recv().unwrap()), [Some(Stuck); 2]);
        });
        assert!(locks.lock(4..5, Access::Exclusive).is_ok());
        drop(held);
        assert!(locks.lock(0..4, Access::Exclusive).is_ok());
    }
}
