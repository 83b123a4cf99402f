//! Keeps the page cache of the files within its limit.

use crate::cache;
use crate::clock::{Cache, Chunk, Clock, Turn};
use crate::line::{self, FileRun, Report, Usage};
use crate::open::Place;
use crate::record::Handle;
use crate::throttle::Throttle;
use rustix::fs::fstat;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at the page cache: while it is a quarter full or more, and else.
const SHORT_PAUSE: Duration = Duration::from_millis(2);
const LONG_PAUSE: Duration = Duration::from_millis(100);

/// Pause if all pages are in use.
const STUCK_PAUSE: Duration = Duration::from_millis(100);

/// Between two reports of usage.
const REPORTS: Duration = Duration::from_millis(100);

/// A look at all files may take this part of the time.
const LOOK_PART: u32 = 8;

/// Time for the pager to have pages unmapped.
const UNMAP_PATIENCE: Duration = Duration::from_secs(1);

/// Bytes in a sector, as the kernel counts them.
const SECTOR: u64 = 512;

/// Orders for the evictor.
#[derive(Default)]
pub(crate) struct Orders {
    limit_bytes: AtomicU64,
    /// The last [`Report::Unmap`] that was answered.
    unmapped: Mutex<u64>,
    answered: Condvar,
}

impl Orders {
    pub(crate) fn new(limit_bytes: u64) -> Orders {
        Orders { limit_bytes: limit_bytes.into(), ..Orders::default() }
    }

    pub(crate) fn set_limit(&self, bytes: u64) {
        self.limit_bytes.store(bytes, Relaxed);
    }

    pub(crate) fn unmapped(&self, number: u64) {
        *self.unmapped.lock().expect("no thread panics with it") = number;
        self.answered.notify_one();
    }

    fn wait(&self, number: u64) {
        let unmapped = self.unmapped.lock().expect("no thread panics with it");
        let is_open = |unmapped: &mut u64| *unmapped < number;
        let waited = self.answered.wait_timeout_while(unmapped, UNMAP_PATIENCE, is_open);
        if waited.expect("no thread panics with it").1.timed_out() {
            tracing::debug!("pages may stay mapped: no answer from the pager");
        }
    }
}

/// The evicting thread.
pub(crate) struct Evictor {
    pub(crate) place: Arc<Place>,
    pub(crate) orders: Arc<Orders>,
    pub(crate) line: UnixStream,
    /// Major and minor number of the disk.
    pub(crate) device: [u32; 2],
}

impl Evictor {
    /// Runs until the pager is gone.
    pub(crate) fn run(self) {
        let throttle = Throttle::of(self.device);
        let mut throttled = 0;
        let mut clock = Clock::default();
        let (mut last_number, mut reported) = (0, None::<Instant>);
        let before = counted(self.device);
        loop {
            let limit = self.orders.limit_bytes.load(Relaxed);
            if throttled != limit {
                throttled = limit;
                // Half: so many pages can be dirty, and as many be clean.
                if let Err(error) = throttle.set(limit / 2) {
                    tracing::warn!(%error, "shared memory may exceed its limit: the kernel does \
                                            not limit dirty pages of one disk");
                }
            }
            let began = Instant::now();
            let mut kernel = Kernel::look(&self, last_number);
            let looked = began.elapsed();
            let resident = kernel.resident;
            if reported.is_none_or(|then| then.elapsed() >= REPORTS) {
                reported = Some(began);
                let now = counted(self.device);
                let usage = Usage {
                    resident_bytes: resident,
                    read_bytes: now.read_bytes.saturating_sub(before.read_bytes),
                    written_bytes: now.written_bytes.saturating_sub(before.written_bytes),
                };
                if line::send(&self.line, &Report::Usage(usage)).is_err() {
                    return;
                }
            }
            let turn = clock.turn(&mut kernel, resident, limit);
            last_number = kernel.last_number;
            drop(kernel);
            let pause = match turn {
                Turn::Progress => Duration::ZERO,
                Turn::Stuck => STUCK_PAUSE,
                Turn::Idle if resident >= limit / 4 => SHORT_PAUSE,
                Turn::Idle => LONG_PAUSE,
            };
            thread::sleep(pause.max(looked * (LOOK_PART - 1)));
        }
    }
}

/// What was read from the disk and written to it.
fn counted([major, minor]: [u32; 2]) -> Usage {
    let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat"));
    let text = text.unwrap_or_default();
    let counts: Vec<u64> = text.split_ascii_whitespace().map_while(|n| n.parse().ok()).collect();
    let sectors = |at: usize| counts.get(at).copied().unwrap_or(0) * SECTOR;
    Usage { resident_bytes: 0, read_bytes: sectors(2), written_bytes: sectors(6) }
}

/// The page cache, as of one look. Files are open no longer than that: their pages are to go when
/// their programs close them.
struct Kernel<'a> {
    evictor: &'a Evictor,
    /// Size and descriptor of each file with cached pages.
    files: BTreeMap<Handle, (u64, OwnedFd)>,
    /// Bytes that are cached.
    resident: u64,
    last_number: u64,
}

impl<'a> Kernel<'a> {
    fn look(evictor: &'a Evictor, last_number: u64) -> Kernel<'a> {
        let mut kernel = Kernel { evictor, files: BTreeMap::new(), resident: 0, last_number };
        let mut gone = Vec::new();
        for handle in evictor.place.handles() {
            match evictor.place.open(&handle) {
                Ok(file) => kernel.add(handle, file),
                Err(Errno::STALE) => gone.push(handle),
                Err(errno) => tracing::debug!(%errno, "a file cannot be opened just now"),
            }
        }
        evictor.place.forget(&gone);
        kernel
    }

    fn add(&mut self, handle: Handle, file: OwnedFd) {
        let bytes = cached_bytes(&file, 0, 0);
        if bytes > 0 {
            self.resident += bytes;
            let size = fstat(&file).map_or(0, |stat| stat.st_size as u64);
            self.files.insert(handle, (size, file));
        }
    }
}

fn cached_bytes(file: &OwnedFd, start: u64, end: u64) -> u64 {
    cache::cached(file, start..end).map_or(0, |cached| cached.pages << 12)
}

impl Cache for Kernel<'_> {
    type File = Handle;

    fn next_file(&mut self, after: Option<Handle>) -> Option<(Handle, u64)> {
        let next = match after {
            None => self.files.iter().next(),
            Some(after) => {
                self.files.range((after_bound(after), std::ops::Bound::Unbounded)).next()
            }
        };
        next.map(|(handle, (size, _))| (*handle, *size))
    }

    fn cached(&mut self, part: &Chunk<Handle>) -> u64 {
        let file = self.files.get(&part.file);
        file.map_or(0, |(_, file)| cached_bytes(file, part.start, part.end))
    }

    fn cool(&mut self, chunks: &[Chunk<Handle>]) {
        let run = |chunk: &Chunk<Handle>| FileRun {
            node: chunk.file.inode(),
            offset: chunk.start,
            bytes: chunk.end - chunk.start,
        };
        self.last_number += 1;
        let number = self.last_number;
        let report = Report::Unmap { number, runs: chunks.iter().map(run).collect() };
        // An error: the pager is gone, which the main thread notices.
        if line::send(&self.evictor.line, &report).is_ok() {
            self.evictor.orders.wait(number);
        }
        for chunk in chunks {
            self.write_back(chunk, false);
        }
    }

    fn is_unwritten(&mut self, chunk: &Chunk<Handle>) -> bool {
        let file = self.files.get(&chunk.file);
        let cached = file.and_then(|(_, file)| cache::cached(file, chunk.start..chunk.end).ok());
        cached.is_some_and(|cached| cached.dirty + cached.in_write_back > 0)
    }

    fn finish(&mut self, chunk: &Chunk<Handle>) {
        self.write_back(chunk, true);
    }

    fn drop_unused(&mut self, chunk: &Chunk<Handle>) {
        if let Some((_, file)) = self.files.get(&chunk.file) {
            // An error leaves the pages where they are.
            let _ = cache::drop_clean(file, chunk.start..chunk.end);
        }
    }
}

fn after_bound(handle: Handle) -> std::ops::Bound<Handle> {
    std::ops::Bound::Excluded(handle)
}

impl Kernel<'_> {
    fn write_back(&self, chunk: &Chunk<Handle>, wait: bool) {
        let Some((_, file)) = self.files.get(&chunk.file) else { return };
        if let Err(errno) = cache::write_back(file, chunk.start..chunk.end, wait) {
            // The volume fails reads of what it could not keep.
            tracing::warn!(%errno, "shared memory cannot be written to the pool");
        }
    }
}
