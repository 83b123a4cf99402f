//! Segments of the spill file come back to the pool when it has room for them.
//!
//! A segment is copied while its lock keeps writers out; readers read it from the file meanwhile.
//! Until the state says that it is back, its extents do not count: a successor gives them back and
//! begins again. The file's room is given back when the last reader there is done.

use crate::BlockError;
use crate::pool::settle;
use crate::pool::store::{Fate, Item, store};
use crate::requests::page_locks::{Access, PageLock};
use crate::spilling::places::{Place, Places};
use crate::spilling::spill::Spill;
use crate::state::{Page, pages_of_segment, word_of};
use crate::volume::Volume;
use hecaton_memory::{PAGE_SIZE, PageNo, page_sum};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Between two looks for room.
const INTERVAL: Duration = Duration::from_secs(1);

/// Pages that are copied at a time: 1 MiB.
const BATCH: usize = 256;

/// Brings segments back until the volume is served no longer.
pub(crate) fn run(volume: &Volume) {
    let (Some(places), Some(spill)) = (&volume.places, &volume.state.spill) else { return };
    while !volume.is_over() {
        std::thread::sleep(INTERVAL);
        for segment in places.spilled() {
            match bring_back(volume, places, spill, segment) {
                Ok(true) => tracing::debug!(segment, "is back in the pool"),
                Ok(false) => {}
                Err(BlockError::NoRoom(_)) => break,
                Err(error) => tracing::debug!(segment, %error, "stays in the spill file"),
            }
        }
    }
}

/// Brings one segment back; false if it is not to be, or was not there.
fn bring_back(
    volume: &Volume,
    places: &Places,
    spill: &Spill,
    segment: u64,
) -> Result<bool, BlockError> {
    let pages = pages_of_segment(segment);
    let lock = volume.locks.lock(pages.clone(), Access::Shared).map_err(|_| BlockError::Stuck)?;
    // After a takeover another process has the tables: nothing is changed in them from here on.
    if volume.is_over() || places.get(segment) != Place::Spill {
        return Ok(false);
    }
    let data = pages.clone().filter_map(|page| match volume.state.page(page) {
        Page::Data(word) => Some((page, word)),
        Page::Hole | Page::Lost => None,
    });
    let data: Vec<(PageNo, u32)> = data.collect();
    let has_room = volume.target.allows(volume.pool_pages(), data.len() as u64);
    if !has_room || !places.may_take() {
        return Ok(false);
    }
    let copied = copy(volume, spill, segment, &data, &lock);
    match &copied {
        Ok(copied) => {
            volume.counters.spilled_pages.fetch_sub(*copied, Relaxed);
            volume.state.set_spilled(segment, false);
            // A segment without data has nothing in the pool either.
            places.set(segment, if *copied == 0 { Place::Nowhere } else { Place::Pool });
        }
        // With the lock: otherwise a client may drop the segment and write it anew before.
        Err(_) => volume.state.freed(segment),
    }
    places.taken();
    drop(lock);
    copied?;
    let lock = volume.locks.lock(pages.clone(), Access::Exclusive);
    // It may have been dropped, and be there again.
    if lock.is_ok() && !volume.is_over() && places.get(segment) != Place::Spill {
        spill.discard(&pages);
    }
    Ok(true)
}

/// Copies all of a segment to donors, and tells how many pages that are.
fn copy(
    volume: &Volume,
    spill: &Spill,
    segment: u64,
    data: &[(PageNo, u32)],
    lock: &PageLock,
) -> Result<u64, BlockError> {
    if data.is_empty() {
        return Ok(0);
    }
    volume.space.hold(segment)?;
    for batch in data.chunks(BATCH) {
        let copied = read(spill, batch).and_then(|contents| {
            let items = batch.iter().zip(contents.chunks_exact(PAGE_SIZE));
            let items = items.map(|((page, _), contents)| Item {
                page: *page,
                sum: page_sum(contents),
                contents,
            });
            give(volume, segment, items.collect(), lock)
        });
        if let Err(error) = copied {
            if let Err(error) = volume.space.free_segment(segment) {
                tracing::debug!(segment, %error, "its extents are kept");
            }
            return Err(error);
        }
    }
    Ok(data.len() as u64)
}

/// Reads pages whose sums have these words.
fn read(spill: &Spill, pages: &[(PageNo, u32)]) -> Result<Vec<u8>, BlockError> {
    let mut contents = vec![0; pages.len() * PAGE_SIZE];
    for ((page, word), contents) in pages.iter().zip(contents.chunks_exact_mut(PAGE_SIZE)) {
        spill.read(*page, contents)?;
        if word_of(page_sum(contents)) != *word {
            return Err(BlockError::Damaged(*page));
        }
    }
    Ok(contents)
}

/// Writes pages to donors, and returns when it is known what became of all of them: none of these
/// writes may come later, when the segment is somewhere else.
fn give(
    volume: &Volume,
    segment: u64,
    mut items: Vec<Item<'_>>,
    lock: &PageLock,
) -> Result<(), BlockError> {
    let mut lane = volume.lanes.take()?;
    let mut failed: Option<BlockError> = None;
    let mut was_sent = false;
    loop {
        let mut pending = Vec::new();
        store(&mut lane, &items, was_sent, |run, fate| match fate {
            Fate::Stored(generation) => volume.state.acknowledged(segment, generation),
            Fate::Unchanged(error) | Fate::Unknown(error) => failed = Some(error),
            Fate::Pending(_) => pending.extend(run),
            Fate::Spilled => {}
        });
        if pending.is_empty() {
            return failed.map_or(Ok(()), Err);
        }
        if volume.is_over() {
            return Err(BlockError::Over);
        }
        items = pending.into_iter().map(|at| items[at]).collect();
        was_sent = true;
        // Writers are refused while a donor is away; readers have the file.
        lock.set_stuck();
        // Without a place beside the others it keeps theirs.
        lane.detach();
        std::thread::sleep(settle::PAUSE);
    }
}
