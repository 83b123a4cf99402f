//! Runs short reads and writes of one client together, without a thread for each.
//!
//! They share a lane: each donor gets all new requests in one call, and the caller takes the ends
//! in any order. To begin a request never waits. A request is not begun if it would wait: for pages
//! of another request, a lane, a connection, the spill file or the write buffer. A failed request
//! is not retried. Both go to a thread of their own, which may wait.
//!
//! A failed write may be with some donors, so it must be written again through the same lane
//! ([`crate::pool::settle`]). That lane takes no further request. When its other requests have
//! ended, it goes to that thread, too.

use super::{PAGE, Volume};
use crate::BlockError;
use crate::pool::lanes::Lent;
use crate::pool::settle::{self, Named, Unsettled};
use crate::pool::store::{Attempt, Writer};
use crate::requests::page_locks::{Access, PageLock};
use crate::state::{Page, SEGMENT_PAGES, word_of};
use crate::volume::{Contents, part};
use hecaton_memory::{Generation, PAGE_SIZE, PageNo, PageSum, is_zero, page_sum};
use hecaton_space::Completion;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Most that is under way.
pub(crate) const MAX_UNDER_WAY: usize = 64;

/// How long donors are waited for before they are looked at again.
pub(crate) const WAIT: Duration = Duration::from_secs(1);

const LONGEST: Timespec = Timespec { tv_sec: WAIT.as_secs() as i64, tv_nsec: 0 };

/// Longest request. A longer one is worth a thread: it costs what copying its data costs.
pub(crate) const MAX_BYTES: usize = 64 << 10;

/// Requests under way, each of which its owner knows by a `T`.
pub(crate) struct Flow<T> {
    volume: Arc<Volume>,
    /// There is one as long as anything is under way.
    lane: Option<Lent>,
    under_way: Vec<Option<Doing<T>>>,
    free: Vec<usize>,
    failed: Vec<Write<T>>,
}

enum Doing<T> {
    Read(Read<T>),
    Write(Write<T>),
}

struct Read<T> {
    asked: T,
    offset: u64,
    bytes: usize,
    data: Vec<u8>,
    /// The pages that donors have, with the words of their sums.
    wanted: Vec<(PageNo, u32)>,
    is_sound: bool,
    _lock: PageLock,
}

struct Write<T> {
    asked: T,
    pages: Range<PageNo>,
    sums: Vec<PageSum>,
    slots: Vec<u32>,
    lock: PageLock,
    /// The first error of a page of it that is settled.
    failed: Option<BlockError>,
}

/// Outcome of an attempt to begin a request.
pub(crate) enum Begun<T> {
    /// Its end is told by [`Flow::progress`].
    UnderWay,
    /// It has ended already.
    Ended(Ended<T>),
    /// It is for a thread of its own.
    Not(T),
}

/// How a request ended.
pub(crate) enum Ended<T> {
    /// It was read.
    Read(T, Vec<u8>, Contents),
    /// All copies have it.
    Written(T),
    /// A read is for a thread of its own.
    Unread(T),
    /// Writes are.
    Unwritten(Unfinished<T>),
}

/// Writes that have failed, and may be with some donors.
pub(crate) struct Unfinished<T> {
    lane: Box<Lent>,
    writes: Vec<Write<T>>,
}

impl<T> Flow<T> {
    pub(crate) fn new(volume: Arc<Volume>) -> Flow<T> {
        let (under_way, free, failed) = (Vec::new(), Vec::new(), Vec::new());
        Flow { volume, lane: None, under_way, free, failed }
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.lane.is_none()
    }

    /// How much is under way.
    pub(crate) fn len(&self) -> usize {
        self.under_way.len() - self.free.len() + self.failed.len()
    }

    /// Begins to read so many bytes into `data`.
    pub(crate) fn read(
        &mut self,
        asked: T,
        offset: u64,
        bytes: usize,
        mut data: Vec<u8>,
    ) -> Begun<T> {
        let Some((pages, lock)) = self.lock(offset, bytes, Access::Shared) else {
            return Begun::Not(asked);
        };
        let volume = &self.volume;
        let mut wanted = Vec::with_capacity((pages.end - pages.start) as usize);
        for page in pages {
            // Before the word: it is noted before the buffer forgets the page.
            if volume.is_buffered(page) {
                return Begun::Not(asked);
            }
            match volume.state.page(page) {
                Page::Lost => return Begun::Not(asked),
                Page::Data(word) => wanted.push((page, word)),
                Page::Hole => data[part(page, offset, bytes as u64).1].fill(0),
            }
        }
        if wanted.is_empty() {
            self.volume.count_read(bytes as u64);
            return Begun::Ended(Ended::Read(asked, data, Contents::Hole));
        }
        let numbers: Vec<PageNo> = wanted.iter().map(|(page, _)| *page).collect();
        let read = Read { asked, offset, bytes, data, wanted, is_sound: true, _lock: lock };
        let begin = |lane: &mut Lent, token| lane.read_later(token, &numbers).is_ok();
        match self.begin(Doing::Read(read), begin) {
            None => Begun::UnderWay,
            Some(Doing::Read(Read { asked, .. }) | Doing::Write(Write { asked, .. })) => {
                Begun::Not(asked)
            }
        }
    }

    /// Begins to write whole pages.
    pub(crate) fn write(&mut self, asked: T, offset: u64, data: &[u8]) -> Begun<T> {
        let volume = Arc::clone(&self.volume);
        let is_whole = offset.is_multiple_of(PAGE) && data.len().is_multiple_of(PAGE_SIZE);
        let is_plain = volume.buffer.is_none() && volume.sealer.is_none();
        if !is_whole || !is_plain {
            return Begun::Not(asked);
        }
        let Some((pages, lock)) = self.lock(offset, data.len(), Access::Exclusive) else {
            return Begun::Not(asked);
        };
        let contents: Vec<&[u8]> = data.chunks_exact(PAGE_SIZE).collect();
        let is_copied = volume.copying.read().expect("no thread panics with it").is_some();
        let stays_hole = |(page, contents): (PageNo, &&[u8])| {
            volume.state.page(page) == Page::Hole && is_zero(contents)
        };
        if is_copied || pages.clone().zip(&contents).any(stays_hole) {
            return Begun::Not(asked);
        }
        let Some(slots) = volume.slots.try_take(contents.len()) else { return Begun::Not(asked) };
        for ((page, contents), slot) in pages.clone().zip(&contents).zip(&slots) {
            volume.state.fill(*slot, page, contents);
        }
        let sums: Vec<PageSum> = contents.iter().map(|contents| page_sum(contents)).collect();
        let numbers: Vec<PageNo> = pages.clone().collect();
        let write = Write { asked, pages, sums: sums.clone(), slots, lock, failed: None };
        let begin = |lane: &mut Lent, token| {
            lane.write_later(token, &numbers, &sums, &[data]).is_ok_and(|begun| begun)
        };
        match self.begin(Doing::Write(write), begin) {
            None => Begun::UnderWay,
            Some(Doing::Read(Read { asked, .. })) => Begun::Not(asked),
            Some(Doing::Write(Write { asked, slots, .. })) => {
                volume.leave(&slots);
                Begun::Not(asked)
            }
        }
    }

    /// Has donors asked for what was begun.
    pub(crate) fn send(&mut self) {
        if let Some(lane) = &mut self.lane {
            lane.send();
        }
    }

    /// Waits until others are as wanted, or donors have answered; while anything is under way, no
    /// longer than [`WAIT`]. How the others are, and whether [`Flow::progress`] is to be called.
    /// One of which nothing is wanted is not looked at: its end would be told for ever.
    pub(crate) fn wait<const N: usize>(
        &self,
        others: [(BorrowedFd<'_>, PollFlags); N],
    ) -> io::Result<([PollFlags; N], bool)> {
        let wanted = others.iter().filter(|(_, flags)| !flags.is_empty());
        let mut fds: Vec<PollFd<'_>> =
            wanted.map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        let looked_at = fds.len();
        let donors = self.lane.iter().flat_map(|lane| lane.descriptors());
        fds.extend(donors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let ready = match poll(&mut fds, (!self.is_idle()).then_some(&LONGEST)) {
            Ok(ready) => ready,
            // Nothing is ready then.
            Err(Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let mut events = fds[..looked_at].iter().map(PollFd::revents);
        let none = PollFlags::empty();
        let found = others
            .map(|(_, flags)| if flags.is_empty() { none } else { events.next().unwrap_or(none) });
        let of_others = found.iter().filter(|events| !events.is_empty()).count();
        Ok((found, ready > of_others || ready == 0))
    }

    /// Takes what donors have answered. Without `wait` it returns at once; with it, when something
    /// has come, or the time has passed.
    pub(crate) fn progress(&mut self, wait: Option<Duration>, ended: &mut dyn FnMut(Ended<T>)) {
        let Some(lane) = &mut self.lane else { return };
        let (volume, under_way, free) = (&self.volume, &mut self.under_way, &mut self.free);
        let failed = &mut self.failed;
        let mut take = |doings: &mut Vec<Option<Doing<T>>>, token: u64| {
            free.push(token as usize);
            doings[token as usize].take()
        };
        lane.progress(wait, &mut |completion| match completion {
            Completion::Read { token, from, data, .. } => {
                let Some(Some(Doing::Read(read))) = under_way.get_mut(token as usize) else {
                    return;
                };
                let pages = data.len() / PAGE_SIZE;
                for (at, contents) in (from..).zip(data.chunks_exact_mut(PAGE_SIZE)) {
                    read.take(volume, at, contents);
                }
                if from + pages == read.wanted.len()
                    && let Some(Doing::Read(read)) = take(under_way, token)
                {
                    ended(read.end(volume));
                }
            }
            Completion::Written { token, generation } => {
                if let Some(Doing::Write(write)) = take(under_way, token) {
                    ended(write.end(volume, generation));
                }
            }
            Completion::Failed { token, .. } => match take(under_way, token) {
                Some(Doing::Read(read)) => ended(Ended::Unread(read.asked)),
                Some(Doing::Write(write)) => failed.push(write),
                None => {}
            },
        });
        self.rest(ended);
    }

    /// The pages that hold these bytes, if they are for a flow at all, nobody has them, and all are
    /// of one segment.
    fn lock(&self, offset: u64, bytes: usize, access: Access) -> Option<(Range<PageNo>, PageLock)> {
        let volume = &self.volume;
        let is_taking = self.failed.is_empty() && self.len() < MAX_UNDER_WAY;
        // The lane goes to those who wait for one when what has it is over.
        if !is_taking
            || bytes > MAX_BYTES
            || volume.places.is_some()
            || volume.reading.is_some()
            || volume.lanes.are_waited_for()
        {
            return None;
        }
        let pages = volume.pages_of(offset, bytes as u64).ok()?;
        if pages.is_empty() || pages.start / SEGMENT_PAGES != (pages.end - 1) / SEGMENT_PAGES {
            return None;
        }
        let lock = volume.locks.try_lock(pages.clone(), access)?;
        // It may have become smaller meanwhile.
        volume.pages_of(offset, bytes as u64).ok()?;
        Some((pages, lock))
    }

    /// Enters a request, if the lane takes it.
    fn begin(
        &mut self,
        doing: Doing<T>,
        begin: impl FnOnce(&mut Lent, u64) -> bool,
    ) -> Option<Doing<T>> {
        if self.lane.is_none() {
            self.lane = self.volume.lanes.try_take();
        }
        let at = self.free.last().copied().unwrap_or(self.under_way.len());
        let has_begun = self.lane.as_mut().is_some_and(|lane| begin(lane, at as u64));
        if !has_begun {
            if self.len() == 0 {
                self.lane = None;
            }
            return Some(doing);
        }
        match self.free.pop() {
            Some(at) => self.under_way[at] = Some(doing),
            None => self.under_way.push(Some(doing)),
        }
        None
    }

    /// Gives the lane away when nothing needs it any more but writes that have failed.
    fn rest(&mut self, ended: &mut dyn FnMut(Ended<T>)) {
        if self.len() > self.failed.len() {
            return;
        }
        if let Some(lane) = self.lane.take()
            && !self.failed.is_empty()
        {
            let writes = std::mem::take(&mut self.failed);
            ended(Ended::Unwritten(Unfinished { lane: Box::new(lane), writes }));
        }
    }
}

impl<T> Read<T> {
    /// A page has come.
    fn take(&mut self, volume: &Volume, at: usize, contents: &mut [u8]) {
        let (page, word) = self.wanted[at];
        if word_of(page_sum(contents)) == word && volume.opens(page, contents) {
            let (of_page, within) = part(page, self.offset, self.bytes as u64);
            self.data[within].copy_from_slice(&contents[of_page]);
        } else {
            volume.space.suspect(page);
            self.is_sound = false;
        }
    }

    fn end(self, volume: &Volume) -> Ended<T> {
        let Read { asked, bytes, data, wanted, is_sound, .. } = self;
        if !is_sound {
            return Ended::Unread(asked);
        }
        volume.target.got(wanted.len() as u64);
        volume.count_read(bytes as u64);
        Ended::Read(asked, data, Contents::Data)
    }
}

impl<T> Write<T> {
    fn end(self, volume: &Volume, generation: Generation) -> Ended<T> {
        let Write { asked, pages, sums, slots, lock, .. } = self;
        volume.target.put(sums.len() as u64, true);
        volume.state.acknowledged(pages.start / SEGMENT_PAGES, generation);
        for (page, sum) in pages.zip(&sums) {
            volume.note(page, Page::Data(word_of(*sum)));
        }
        volume.leave(&slots);
        drop(lock);
        volume.count_write((sums.len() * PAGE_SIZE) as u64);
        Ended::Written(asked)
    }

    /// Writes through the same lane once more.
    fn again(&self, volume: &Volume, lane: &mut Lent) -> Attempt {
        let named = Named::of(&volume.state, &self.slots);
        let items: Vec<_> = named.iter().map(Named::item).collect();
        volume.store(lane, &items, &self.slots, true, Writer::Client)
    }
}

impl<T> Unfinished<T> {
    /// Writes them again, one after the other, and says of each how it ended, once nobody is kept
    /// from their pages: whoever is told may take its time. When a donor stays away, that one and
    /// the rest are left to be settled.
    pub(crate) fn finish(self, volume: &Arc<Volume>) -> Vec<(T, Result<(), BlockError>)> {
        let Unfinished { mut lane, mut writes } = self;
        let mut ends = Vec::with_capacity(writes.len());
        let mut end = |asked, pages: Range<PageNo>, result| {
            let (offset, bytes) = (pages.start * PAGE, (pages.end - pages.start) * PAGE);
            ends.push((asked, volume.counted("write", offset, bytes, result)));
        };
        while let Some(mut write) = writes.pop() {
            let Attempt { pending, failed, mut waiting } = write.again(volume, &mut lane);
            write.failed = write.failed.or(failed);
            if pending.is_empty() {
                drop(write.lock);
                end(write.asked, write.pages, write.failed.map_or(Ok(()), Err));
                continue;
            }
            write.slots = pending.into_iter().map(|at| write.slots[at]).collect();
            writes.push(write);
            let slots = writes.iter().map(|write| write.slots.len()).sum();
            let is_left = volume.may_leave_unsettled(&mut lane, slots);
            if !is_left && !volume.is_over() {
                continue;
            }
            let (mut locks, mut slots) = (Vec::new(), Vec::new());
            for Write { asked, pages, slots: of_it, lock, failed, .. } in writes.into_iter().rev() {
                lock.set_stuck();
                locks.push(lock);
                slots.extend(of_it);
                let others = if is_left { BlockError::Stuck } else { BlockError::Over };
                end(asked, pages, Err(failed.or(waiting.take()).unwrap_or(others)));
            }
            if is_left {
                settle::begin(volume, Unsettled::Writes(lane, locks, slots, Writer::Client));
            }
            break;
        }
        ends
    }
}
