//! Reads files: from staging, from donors, and zeros. Waits for room in local memory.

use super::{Handler, MAX_IO_BYTES, Outcome, Stop};
use crate::core::Core;
use crate::files::contents::{Found, key_of};
use crate::files::fetch::{Away, Came};
use hecaton_fuse::wire::{Reply, Request};
use hecaton_memory::PAGE_SIZE;
use hecaton_space::group::DonorIndex;
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// How long a request waits for room while eviction makes no progress. Then it exceeds the limit:
/// it must not wait forever for pages that are pinned.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(1);

impl Handler {
    pub(super) fn read(&mut self, request: &Request, buffer: &mut [u8]) -> Outcome {
        let (offset, bytes) = (request.u64_at(8), request.u32_at(16) as usize);
        let page = PAGE_SIZE as u64;
        let first = offset / page;
        let mut has_waited = false;
        loop {
            let mut core = self.shared.lock();
            let file = core.files.table.with_node(request.node).ok_or(Errno::NOENT)?;
            let left = core.files.table.size(&core.state, file).saturating_sub(offset);
            let bytes = bytes.min(MAX_IO_BYTES).min(usize::try_from(left).unwrap_or(usize::MAX));
            let skipped = (offset % page) as usize;
            let pages = (skipped + bytes).div_ceil(PAGE_SIZE);
            if core.room() < pages as u64 && !has_waited {
                drop(core);
                self.wait_for_room(pages as u64)?;
                has_waited = true;
                continue;
            }
            let mut away = Vec::new();
            for (i, to) in buffer.chunks_exact_mut(PAGE_SIZE).take(pages).enumerate() {
                let found = core.find_of_file(key_of(file, first + i as u64));
                if let Found::Away { page, record } = found {
                    away.push((i, Away { page, record }));
                }
                copy(&core, found, to);
            }
            if !away.is_empty() {
                drop(core);
                let Some(came) = self.fetch(&away, buffer)? else { continue };
                core = self.shared.lock();
                // Another thread may have written or cut the pages.
                let is_as_before = away.iter().all(|&(i, Away { page, record })| {
                    let found = core.find_of_file(key_of(file, first + i as u64));
                    found == Found::Away { page, record }
                });
                if core.files.table.with_node(request.node) != Some(file) || !is_as_before {
                    continue;
                }
                core.stats.pages_in += came as u64;
            }
            let is_counted = !core.tables.are_full();
            for i in (0..pages as u64).filter(|_| is_counted) {
                core.cached(key_of(file, first + i));
            }
            core.note_peaks();
            if core.wants_eviction() {
                self.shared.evict.notify_one();
            }
            drop(core);
            buffer.copy_within(skipped..skipped + bytes, 0);
            return Ok(Reply::Bytes(bytes));
        }
    }

    /// Fetches pages into their places in `buffer`, and returns their number. `None` if the caller
    /// must look again, because a page has changed.
    pub(super) fn fetch(
        &mut self,
        away: &[(usize, Away)],
        buffer: &mut [u8],
    ) -> Result<Option<usize>, Stop> {
        let pages: Vec<Away> = away.iter().map(|&(_, away)| away).collect();
        let mut data = vec![0; pages.len() * PAGE_SIZE];
        let Some(came) = self.fetch_once(&pages, &[], &mut data)? else { return Ok(None) };
        let each = away.iter().zip(came).zip(data.chunks_mut(PAGE_SIZE));
        for ((&(i, away), came), data) in each {
            if let Came::Wrong(giver) = came
                && !self.fetch_again(away, giver, data)?
            {
                return Ok(None);
            }
            buffer[i * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(data);
        }
        Ok(Some(away.len()))
    }

    /// Fetches a page from other donors than those that sent wrong data. Returns false if the page
    /// has changed.
    fn fetch_again(&mut self, away: Away, giver: DonorIndex, to: &mut [u8]) -> Result<bool, Stop> {
        let mut avoid = vec![giver];
        loop {
            let mut core = self.shared.lock();
            if core.pages.record(&core.state, away.page) != away.record {
                return Ok(false);
            }
            core.stats.checksum_errors += 1;
            let fetcher = self.fetcher.as_ref().ok_or(Stop::Wait)?;
            if avoid.len() >= fetcher.chances() {
                core.fail(format!("a page came back wrong {} times", avoid.len()));
                return Err(Stop::Lost);
            }
            drop(core);
            fetcher.suspect(away.page);
            match self.fetch_once(&[away], &avoid, to)?.as_deref() {
                None => return Ok(false),
                Some([Came::Wrong(giver)]) => avoid.push(*giver),
                Some(_) => return Ok(true),
            }
        }
    }

    /// Fetches pages into `to`. `None` if donors lack one that has changed meanwhile.
    fn fetch_once(
        &mut self,
        pages: &[Away],
        avoid: &[DonorIndex],
        to: &mut [u8],
    ) -> Result<Option<Vec<Came>>, Stop> {
        let fetcher = self.fetcher.as_mut().ok_or(Stop::Wait)?;
        let error = match fetcher.fetch(pages, avoid, to) {
            Ok(came) => return Ok(Some(came)),
            Err(error) => error,
        };
        let mut core = self.shared.lock();
        let is_wanted = |away: &Away| core.pages.record(&core.state, away.page) == away.record;
        // The segment of a page that was freed meanwhile may be gone without harm.
        if pages.iter().all(is_wanted) {
            core.fail(error.to_string());
            return Err(Stop::Lost);
        }
        Ok(None)
    }

    /// Waits until local memory has room for so many more pages, or eviction makes no progress.
    pub(in crate::files) fn wait_for_room(&self, pages: u64) -> Result<(), Stop> {
        self.shared.lock().files.waiting += 1;
        let waited = self.look_for_room(pages);
        self.shared.lock().files.waiting -= 1;
        waited
    }

    fn look_for_room(&self, pages: u64) -> Result<(), Stop> {
        let (mut last_progress, mut evicted) = (Instant::now(), 0);
        loop {
            let core = self.shared.lock();
            if core.room() >= pages || core.failed.is_some() {
                return Ok(());
            }
            let now = core.stats.pages_evicted;
            drop(core);
            if now != evicted {
                (last_progress, evicted) = (Instant::now(), now);
            } else if last_progress.elapsed() >= PATIENCE {
                return Ok(());
            }
            self.wait()?;
        }
    }

    /// Wakes the evictor, which makes room, and waits 1 ms.
    pub(super) fn wait(&self) -> Result<(), Stop> {
        if self.fetcher.is_none() {
            return Err(Stop::Wait);
        }
        self.shared.evict.notify_one();
        std::thread::sleep(PAUSE);
        Ok(())
    }
}

/// Copies contents that are on this host. Leaves `to` as it is if only donors have them.
pub(super) fn copy(core: &Core, found: Found, to: &mut [u8]) {
    match found {
        Found::Zeros => to.fill(0),
        // SAFETY: a slot that a record names holds that page's 4096 bytes, and the lock is held.
        Found::Staged(slot) => unsafe {
            to.as_mut_ptr().copy_from_nonoverlapping(core.state.slot(slot), PAGE_SIZE);
        },
        Found::Away { .. } => {}
    }
}
