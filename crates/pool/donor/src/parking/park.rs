//! Where a page of a donor that parks is: in memory, or in the file.
//!
//! For each written page, a bit in the ledger says whether the file or the arena has it. Only the
//! [`keeper`](crate::parking::keeper) sets the bit, once the page is on the disk; everything else
//! clears it. A write puts its page in memory, whatever the file has, so only reads wait for the
//! disk. The bit outlives the process with the ledger, as the file does.
//!
//! No lock is held while the disk is at work. A read holds its extent, and so keeps a page in the
//! place where it found it: see [`View`](crate::pages::gate::View).

use crate::extents::layout::Layout;
use crate::pages::bits::{Bits, words_for};
use crate::parking::park_file::{ParkConfig, ParkError, ParkFile};
use crate::snapshot::ParkSnapshot;
use hecaton_memory::words::SharedWords;
use hecaton_memory::{PAGE_SIZE, PageSum, Size, ZERO_PAGE_SUM, pages_to_bytes};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tracing::warn;

/// More pages of parked extents than that in memory again, and who writes such pages waits a
/// little.
const MANY_STRAYS: u64 = (64 << 20) / PAGE_SIZE as u64;

/// How long a write waits at most for the keeper to catch up. Shorter than a donor may be silent
/// before borrowers do without it.
const WRITE_WAIT: Duration = Duration::from_millis(50);

/// How long the keeper leaves a file alone that has failed.
const TROUBLE_MS: u64 = 10_000;

/// Parked pages of a donor, and the state of its file.
pub(crate) struct Park {
    pub(crate) file: ParkFile,
    words: Arc<SharedWords>,
    layout: Layout,
    limits: ParkLimits,
    /// Pages of parked extents that are in memory, because they were written since.
    stray_pages: AtomicU64,
    /// The file has room that nothing parked takes.
    is_untidy: AtomicBool,
    trouble: Mutex<Option<Trouble>>,
    moved: Condvar,
    counts: Counts,
}

/// How much is parked, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParkLimits {
    pub(crate) limit: Option<Size>,
    pub(crate) patience: Duration,
}

impl From<&ParkConfig> for ParkLimits {
    fn from(config: &ParkConfig) -> ParkLimits {
        ParkLimits { limit: config.limit, patience: config.patience }
    }
}

/// Why the file takes nothing at present.
struct Trouble {
    text: String,
    until_ms: u64,
}

#[derive(Default)]
struct Counts {
    stored: AtomicU64,
    fetched: AtomicU64,
    read: AtomicU64,
    unreadable: AtomicU64,
}

/// Parking state of one extent.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    /// It counts as in the file, but for what was written since.
    pub(crate) is_parked: AtomicBool,
    /// When it was last read or written, give or take some milliseconds.
    touched_ms: AtomicU64,
    /// Which of its pages the keeper has read and nobody has changed since. Under the extent's
    /// `contents`, as the pages themselves.
    saving: OnceLock<Box<[AtomicU64]>>,
}

impl Parking {
    pub(crate) fn touch(&self, now_ms: u64) {
        // As the gate's.
        const GRAIN_MS: u64 = 64;
        if now_ms >= self.touched_ms.load(Ordering::Relaxed) + GRAIN_MS {
            self.touched_ms.store(now_ms, Ordering::Relaxed);
        }
    }

    pub(crate) fn touched_ms(&self) -> u64 {
        self.touched_ms.load(Ordering::Relaxed)
    }

    /// Pages of the extent that are being saved as they are.
    pub(crate) fn saving(&self, pages: u64) -> Bits<'_> {
        Bits(self.saving.get_or_init(|| words_for(pages)))
    }

    /// Pages of the extent have changed: what was saved of them is of no use.
    pub(crate) fn changed(&self, pages: Range<u64>) {
        if let Some(saving) = self.saving.get() {
            Bits(saving).clear(pages);
        }
    }
}

impl Park {
    /// With a new file, in which nothing is.
    pub(crate) fn new(
        file: ParkFile,
        limits: ParkLimits,
        words: Arc<SharedWords>,
        layout: Layout,
    ) -> Park {
        Park {
            file,
            words,
            layout,
            limits,
            stray_pages: AtomicU64::new(0),
            is_untidy: AtomicBool::new(false),
            trouble: Mutex::new(None),
            moved: Condvar::new(),
            counts: Counts::default(),
        }
    }

    /// With the file of a predecessor and what the ledger says of it.
    pub(crate) fn adopt(
        fd: OwnedFd,
        limits: ParkLimits,
        words: Arc<SharedWords>,
        layout: Layout,
    ) -> Result<Park, ParkError> {
        let file = ParkFile::adopt(fd, layout.pages, parked_in(&words, layout))?;
        Ok(Park::new(file, limits, words, layout))
    }

    /// Which pages the file has.
    pub(crate) fn parked(&self) -> Bits<'_> {
        parked_in(&self.words, self.layout)
    }

    /// A page was written, and so is in memory.
    pub(crate) fn rewritten(&self, parking: &Parking, page: u64, was_unwritten: bool) {
        let was_parked = self.parked().clear(page..page + 1);
        if (was_parked || was_unwritten) && parking.is_parked.load(Ordering::Relaxed) {
            self.stray_pages.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Forgets the contents of pages.
    pub(crate) fn forget(&self, pages: Range<u64>) {
        if self.parked().clear(pages) {
            self.is_untidy.store(true, Ordering::Relaxed);
        }
    }

    /// Reads parked pages that follow one another, with the sums that they should have. One that
    /// the disk does not give comes as something that does not have its sum, as if it had gone bad
    /// in memory.
    pub(crate) fn read(&self, first: u64, sums: &[PageSum], pages: &mut [[u8; PAGE_SIZE]]) {
        self.counts.read.fetch_add(pages.len() as u64, Ordering::Relaxed);
        if self.file.read(first, pages).is_ok() {
            return;
        }
        for ((at, page), sum) in (first..).zip(pages).zip(sums) {
            if let Err(error) = self.file.read(at, std::slice::from_mut(page)) {
                if self.counts.unreadable.fetch_add(1, Ordering::Relaxed) == 0 {
                    warn!(%error, "a parked page cannot be read; further ones are only counted");
                }
                page.fill(if *sum == ZERO_PAGE_SUM { 1 } else { 0 });
            }
        }
    }

    /// After a write to a parked extent: waits a little if there are many that the keeper has not
    /// parked again yet. Without that, a borrower could bring back what its donor's host needs, as
    /// fast as the network is. While the disk takes nothing there is nothing to wait for.
    pub(crate) fn let_keeper_catch_up(&self) {
        if self.stray_pages() <= MANY_STRAYS {
            return;
        }
        let trouble = self.trouble();
        if trouble.is_none() {
            drop(self.moved.wait_timeout(trouble, WRITE_WAIT));
        }
    }

    /// Pages of parked extents that are in memory.
    pub(crate) fn stray_pages(&self) -> u64 {
        self.stray_pages.load(Ordering::Relaxed)
    }

    /// How many there were when they were counted.
    pub(crate) fn set_stray_pages(&self, pages: u64) {
        self.stray_pages.store(pages, Ordering::Relaxed);
    }

    /// Whether the file had room to give back. It is the caller's to do that now.
    pub(crate) fn take_untidy(&self) -> bool {
        self.is_untidy.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn stored(&self, pages: u64) {
        self.counts.stored.fetch_add(pages, Ordering::Relaxed);
        *self.trouble() = None;
        self.moved.notify_all();
    }

    pub(crate) fn fetched(&self, pages: u64) {
        self.counts.fetched.fetch_add(pages, Ordering::Relaxed);
    }

    /// The file has failed to take something.
    pub(crate) fn has_failed(&self, why: &std::io::Error, now_ms: u64) {
        let mut trouble = self.trouble();
        if trouble.is_none() {
            warn!(error = %why, "pages cannot be parked; they stay in memory");
        }
        *trouble = Some(Trouble { text: why.to_string(), until_ms: now_ms + TROUBLE_MS });
        self.moved.notify_all();
    }

    /// Pages that may be parked beside those.
    pub(crate) fn room_pages(&self, parked_pages: u64) -> u64 {
        let most = self.limits.limit.map_or(u64::MAX, |limit| limit.0 / PAGE_SIZE as u64);
        most.saturating_sub(parked_pages)
    }

    pub(crate) fn patience(&self) -> Duration {
        self.limits.patience
    }

    /// There is nothing that the file should take.
    pub(crate) fn is_not_needed(&self) {
        *self.trouble() = None;
    }

    /// Whether the file may be asked to take something.
    pub(crate) fn takes_pages(&self, now_ms: u64) -> bool {
        self.trouble().as_ref().is_none_or(|trouble| now_ms >= trouble.until_ms)
    }

    pub(crate) fn snapshot(&self, parked_pages: u64) -> ParkSnapshot {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ParkSnapshot {
            parked_pages: parked_pages.saturating_sub(self.stray_pages()),
            file_bytes: pages_to_bytes(self.file.pages()),
            limit_bytes: self.limits.limit.map(|limit| limit.0),
            trouble: self.trouble().as_ref().map(|trouble| trouble.text.clone()),
            pages_stored: count(&self.counts.stored),
            pages_fetched: count(&self.counts.fetched),
            pages_read: count(&self.counts.read),
            pages_unreadable: count(&self.counts.unreadable),
        }
    }

    fn trouble(&self) -> MutexGuard<'_, Option<Trouble>> {
        self.trouble.lock().expect("no thread panics with the trouble")
    }
}

/// Which pages a ledger says are in a file.
pub(crate) fn parked_in(words: &SharedWords, layout: Layout) -> Bits<'_> {
    Bits(&words.wide()[layout.parked()..layout.wide()])
}
