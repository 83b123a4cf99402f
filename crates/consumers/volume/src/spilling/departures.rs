//! Segments of the pool go to the spill file when the policy takes memory back.
//!
//! The segment that was unused for longest goes first, and recently used ones stay: the policy
//! takes back idle memory. A segment is copied while its lock keeps writers out; readers read it
//! from donors meanwhile. The copy in the file does not count before the disk has it and the state
//! names it. The segment's extents are given back when the last reader there is done.

use crate::BlockError;
use crate::pool::fetch::fetch;
use crate::requests::page_locks::Access;
use crate::spilling::places::{Place, Places};
use crate::spilling::spill::Spill;
use crate::state::{Page, pages_of_segment};
use crate::volume::Volume;
use hecaton_memory::PageNo;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Between two looks at what is wanted.
const INTERVAL: Duration = Duration::from_secs(1);

/// A segment that was used this recently stays in the pool.
const IDLE: Duration = Duration::from_secs(10);

/// Pages that are copied at a time: 1 MiB.
const BATCH: usize = 256;

/// Takes segments out until the volume is served no longer.
pub(crate) fn run(volume: &Volume) {
    let (Some(places), Some(spill)) = (&volume.places, &volume.state.spill) else { return };
    // Those whose extents are still to be given back.
    let mut left: Vec<u64> = Vec::new();
    while !volume.is_over() {
        std::thread::sleep(INTERVAL);
        left.retain(|segment| !give_back(volume, places, *segment));
        let wanted = volume.target.to_give(volume.pool_pages());
        left.extend(take_out(volume, places, spill, wanted, IDLE));
    }
}

/// Brings as many pages to the file as are wanted, and tells of which segments the extents are
/// still to be given back.
pub(crate) fn take_out(
    volume: &Volume,
    places: &Places,
    spill: &Spill,
    mut wanted: u64,
    idle: Duration,
) -> Vec<u64> {
    let mut left = Vec::new();
    if wanted == 0 {
        return left;
    }
    for segment in places.idle(idle) {
        match copy_out(volume, places, spill, segment) {
            Ok(pages) => {
                wanted = wanted.saturating_sub(pages);
                if pages > 0 && !give_back(volume, places, segment) {
                    left.push(segment);
                }
            }
            // The others would not find room there either.
            Err(BlockError::Spill(error)) => {
                tracing::warn!(volume = volume.name(), segment, %error, "stays in the pool");
                break;
            }
            Err(error) => tracing::debug!(segment, %error, "stays in the pool"),
        }
        if wanted == 0 || volume.is_over() {
            break;
        }
    }
    left
}

/// Copies a segment to the file, where it is from then on; tells how many pages that are, and none
/// if it is not in the pool.
pub(crate) fn copy_out(
    volume: &Volume,
    places: &Places,
    spill: &Spill,
    segment: u64,
) -> Result<u64, BlockError> {
    let pages = pages_of_segment(segment);
    let lock = volume.locks.lock(pages.clone(), Access::Shared).map_err(|_| BlockError::Stuck)?;
    // After a takeover another process has the tables: nothing is changed in them from here on.
    if volume.is_over() || places.get(segment) != Place::Pool {
        return Ok(0);
    }
    let data = pages.clone().filter_map(|page| match volume.state.page(page) {
        Page::Data(word) => Some((page, word)),
        Page::Hole | Page::Lost => None,
    });
    let data: Vec<(PageNo, u32)> = data.collect();
    if data.is_empty() {
        return Ok(0);
    }
    if let Err(error) = copy(volume, spill, &data) {
        drop(lock);
        // If the segment came back from the file lately, there may still be readers there.
        let lock = volume.locks.lock(pages.clone(), Access::Exclusive);
        if lock.is_ok() && !volume.is_over() && places.get(segment) != Place::Spill {
            spill.discard(&pages);
        }
        return Err(error);
    }
    volume.state.set_spilled(segment, true);
    places.set(segment, Place::Spill);
    volume.counters.spilled_pages.fetch_add(data.len() as u64, Relaxed);
    volume.counters.taken_back_pages.fetch_add(data.len() as u64, Relaxed);
    drop(lock);
    Ok(data.len() as u64)
}

/// Returns when the disk has these pages.
fn copy(volume: &Volume, spill: &Spill, data: &[(PageNo, u32)]) -> Result<(), BlockError> {
    let mut lane = volume.lanes.take()?;
    for batch in data.chunks(BATCH) {
        let mut failed = None;
        let fetched = fetch(&mut lane, batch, &mut |at, contents| {
            if let Err(error) = spill.write(batch[at].0, contents) {
                failed.get_or_insert(error);
            }
            true
        });
        fetched.map_err(|(_, error)| error)?;
        failed.map_or(Ok(()), Err)?;
    }
    // Clients that have flushed were told that it is kept.
    Ok(spill.flush()?)
}

/// Gives the extents back of a segment that is in the pool no longer; false if that is to be tried
/// again.
fn give_back(volume: &Volume, places: &Places, segment: u64) -> bool {
    // Readers of its extents still hold the lock.
    let pages = pages_of_segment(segment);
    let Ok(_lock) = volume.locks.lock(pages, Access::Exclusive) else { return false };
    if volume.is_over() {
        return false;
    }
    if places.get(segment) == Place::Pool {
        return true;
    }
    match volume.space.free_segment(segment) {
        Ok(()) => {
            volume.state.freed(segment);
            true
        }
        Err(error) => {
            tracing::debug!(segment, %error, "its extents are kept");
            false
        }
    }
}
