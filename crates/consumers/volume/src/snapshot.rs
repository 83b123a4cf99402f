//! Copies a volume as of one moment, while clients go on using it.
//!
//! For an instant all pages are locked, so that no request is in flight: that is the moment. Pages
//! that hold data then are noted, and copied from then on. A request that changes a noted page
//! copies it first, so it waits only for the pages that it changes. The copy is a space of its own,
//! with its own tables, which another process serves once it is whole.

use crate::requests::page_locks::Access;
use crate::state::{Page, SEGMENT_PAGES, State};
use crate::volume::{Volume, VolumeConfig};
use crate::{BlockError, SnapshotError};
use hecaton_memory::{PAGE_SIZE, PageNo, pages_to_bytes};
use hecaton_space::Directory;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

/// Pages that are copied at a time.
const BATCH: usize = 64;

/// A copy on its way.
pub(crate) struct Copying {
    target: Arc<Volume>,
    /// A bit for each page: it is to be copied yet.
    left: Vec<AtomicU64>,
    /// Why it cannot be made.
    failed: Mutex<Option<BlockError>>,
    has_failed: AtomicBool,
}

/// A copy that is whole. It is given up when this is dropped, unless somebody takes it.
pub struct Snapshot {
    target: Option<Arc<Volume>>,
}

impl Snapshot {
    /// The tables of the copy, for the process that is to serve it.
    pub fn state(&self) -> std::io::Result<OwnedFd> {
        let target = self.target.as_ref().expect("it is there until it is taken");
        target.state.as_fd().try_clone_to_owned()
    }

    /// Somebody has the tables, and serves the copy from now on.
    pub fn taken(mut self) {
        if let Some(target) = self.target.take() {
            target.abandon();
        }
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        if let Some(target) = self.target.take() {
            give_up(&target);
        }
    }
}

impl Copying {
    fn is_left(&self, page: PageNo) -> bool {
        let word = self.left.get(page as usize / 64);
        word.is_some_and(|word| word.load(Acquire) >> (page % 64) & 1 == 1)
    }

    fn is_done(&self, page: PageNo) {
        self.left[page as usize / 64].fetch_and(!(1 << (page % 64)), AcqRel);
    }

    fn fail(&self, error: BlockError) {
        self.failed.lock().expect("no thread panics with it").get_or_insert(error);
        self.has_failed.store(true, Release);
    }
}

impl Volume {
    /// Copies the volume as it is at one moment, and returns when all of it is copied. `config` is
    /// the copy's.
    pub fn snapshot(
        self: &Arc<Self>,
        config: VolumeConfig,
        directory: Arc<dyn Directory>,
    ) -> Result<Snapshot, SnapshotError> {
        let _turn = self.snapshotting.try_lock().map_err(|_| SnapshotError::Another)?;
        let pages = self.state.pages();
        let target = Volume::open(config, directory, State::create(pages)?)?;
        let copied = self.copy_to(&target, pages);
        *self.copying.write().expect("no thread panics with it") = None;
        match copied {
            Ok(()) => Ok(Snapshot { target: Some(target) }),
            Err(error) => {
                give_up(&target);
                Err(error)
            }
        }
    }

    fn copy_to(self: &Arc<Self>, target: &Arc<Volume>, pages: u64) -> Result<(), SnapshotError> {
        let left = (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let (failed, has_failed) = (Mutex::default(), AtomicBool::new(false));
        let mut copying = Copying { target: Arc::clone(target), left, failed, has_failed };
        let copying = {
            let lock = self.locks.lock(0..pages, Access::Exclusive);
            let _lock = lock.map_err(|_| BlockError::Stuck)?;
            for segment in 0..pages.div_ceil(SEGMENT_PAGES) {
                let first = segment * SEGMENT_PAGES;
                let of_segment = first..(first + SEGMENT_PAGES).min(pages);
                self.note_left(&mut copying.left, of_segment)?;
            }
            let copying = Arc::new(copying);
            *self.copying.write().expect("no thread panics with it") = Some(Arc::clone(&copying));
            copying
        };
        let mut next = 0;
        while let Some(batch) = copying.batch(&mut next) {
            // The lock keeps writers out; no other thread takes pages off the list.
            let lock = self.locks.lock_these(batch.clone(), Access::Shared);
            let _lock = lock.map_err(|_| BlockError::Stuck)?;
            // Some may have been copied, and changed, before they were locked.
            let batch = batch.into_iter().filter(|page| copying.is_left(*page)).collect();
            self.preserve_in(&copying, batch);
            if copying.has_failed.load(Acquire) {
                break;
            }
            if self.is_over() {
                return Err(BlockError::Over.into());
            }
        }
        match copying.failed.lock().expect("no thread panics with it").take() {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    /// Notes which pages hold data, while all of them are locked.
    fn note_left(&self, left: &mut [AtomicU64], pages: Range<PageNo>) -> Result<(), BlockError> {
        let mut note = |page: PageNo| *left[page as usize / 64].get_mut() |= 1 << (page % 64);
        if let Some(buffer) = &self.buffer {
            buffer.within(pages.clone()).into_iter().for_each(&mut note);
        }
        if !self.state.is_begun(pages.start / SEGMENT_PAGES) {
            return Ok(());
        }
        for page in pages {
            match self.state.page(page) {
                Page::Hole => {}
                Page::Data(_) => note(page),
                // One that is written again is not lost any more.
                Page::Lost if self.is_buffered(page) => {}
                Page::Lost => return Err(BlockError::Unkept(page)),
            }
        }
        Ok(())
    }

    /// To be called before pages change, with their lock: a copy that is on its way gets what they
    /// hold.
    pub(crate) fn preserve(&self, pages: Range<PageNo>) {
        let copying = self.copying.read().expect("no thread panics with it").clone();
        let Some(copying) = copying else { return };
        if !copying.has_failed.load(Acquire) {
            let left: Vec<PageNo> = pages.filter(|page| copying.is_left(*page)).collect();
            left.chunks(BATCH).for_each(|batch| self.preserve_in(&copying, batch.to_vec()));
        }
    }

    /// Copies pages that are left. One that cannot be is the end of the copy, and of nothing else.
    fn preserve_in(&self, copying: &Copying, pages: Vec<PageNo>) {
        let copied = self.contents_of(&pages).and_then(|contents| {
            // Runs of pages, each written at once.
            let mut at = 0;
            while at < pages.len() {
                let is_next = |end: usize| end < pages.len() && pages[end] == pages[end - 1] + 1;
                let mut end = at + 1;
                while is_next(end) {
                    end += 1;
                }
                let bytes = &contents[at * PAGE_SIZE..end * PAGE_SIZE];
                copying.target.write(pages_to_bytes(pages[at]), bytes)?;
                at = end;
            }
            Ok(())
        });
        match copied {
            Ok(()) => pages.into_iter().for_each(|page| copying.is_done(page)),
            Err(error) => copying.fail(error),
        }
    }
}

impl Copying {
    /// Some pages that are left, from `next` on, which it moves beyond them; none if there are
    /// none.
    fn batch(&self, next: &mut PageNo) -> Option<Vec<PageNo>> {
        let mut batch = Vec::new();
        while batch.len() < BATCH && (*next as usize) < self.left.len() * 64 {
            if next.is_multiple_of(64) && self.left[*next as usize / 64].load(Acquire) == 0 {
                *next += 64;
                continue;
            }
            if self.is_left(*next) {
                batch.push(*next);
            }
            *next += 1;
        }
        (!batch.is_empty()).then_some(batch)
    }
}

fn give_up(target: &Volume) {
    if let Err(error) = target.release() {
        // Donors have it back when its lease ends.
        tracing::warn!(%error, "not all donors could be told of a copy that is given up");
    }
}
