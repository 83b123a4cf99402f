//! Tracks which space holds which extents: the state machine behind every control request.
//!
//! Pure: time comes in as milliseconds since any fixed moment, and actions on the memory go out as
//! values. The donor drives it under a lock, and the cluster simulation drives the same code from a
//! seed. Maps are ordered, so that one seed always gives one run.
//!
//! States of an extent: *lent* by [`Table::allocate`], *leaving* once freed or once its lease ran
//! out, gone with [`Table::reclaimed`]. No borrower may use a leaving extent, but its pages are not
//! free yet: a read may still send them, and the host has not got the memory back.
//!
//! Invariants ([`Table::assert_consistent`] checks them):
//! 1. Extents that are lent or leaving do not overlap, and their pages are exactly those that the
//!    allocators count as lent.
//! 2. A space has at most one extent for each member of each segment.
//! 3. Ids rise and are never reused.
//! 4. No extent is lent above the limit. Extents lent before the limit was lowered are recalled.
//!    Parked extents are lent.
//! 5. The fence of a space never falls while the space is known. A space is known while it has an
//!    extent or a connection, and for [`FENCE_KEPT_MS`] after its lease if it was ever fenced.

mod extent;
mod free_pages;
mod parked;
mod recall;
#[cfg(test)]
mod tests;

use crate::extents::owner::NodeDigest;
pub use extent::LentExtent;
use free_pages::FreePages;
pub use free_pages::Zone;
use hecaton_memory::{Epoch, ExtentId, SpaceId};
use hecaton_transport::protocol::Refusal;
use parked::Parked;
use recall::Asked;
use std::collections::BTreeMap;

/// Shortest lease; shorter requests are raised to it. A lease must outlast a pause of the
/// borrower's host that is no failure.
pub const MIN_LEASE_MS: u64 = 1_000;

/// Longest lease: the memory of a dead borrower must come back eventually.
pub const MAX_LEASE_MS: u64 = 24 * 3_600_000;

/// How long a fence is remembered after the space's lease, so that a borrower that was cut off
/// meanwhile still finds that it was replaced.
pub const FENCE_KEPT_MS: u64 = 3_600_000;

/// Bounds of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLimits {
    /// Extents that are lent or leaving.
    pub extents: usize,
    /// Spaces that are known.
    pub spaces: usize,
    /// The smallest order that is lent.
    pub min_order: u8,
}

/// Refuses an epoch older than the space's fence. Only this function does so.
pub fn check_epoch(fence: Epoch, epoch: Epoch) -> Result<(), Refusal> {
    if epoch < fence { Err(Refusal::StaleEpoch(fence)) } else { Ok(()) }
}

/// Record of a space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceRecord {
    /// The space.
    pub space: SpaceId,
    /// The oldest epoch that is served.
    pub fence: Epoch,
    /// Milliseconds that its extents stay without a sign of life.
    pub lease_ms: u64,
    /// Name of its consumer, for people.
    pub consumer: String,
    /// Owning node, where nodes have certificates and the space was fenced.
    pub owner: Option<NodeDigest>,
}

/// A space and its use of memory, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceUse {
    /// Record of the space.
    pub record: SpaceRecord,
    /// Extents lent to it.
    pub extents: usize,
    /// Pages in them.
    pub pages: u64,
    /// Extents that are recalled.
    pub recalled: u64,
    /// Time of the last sign of life, in milliseconds.
    pub heard_ms: u64,
}

/// Extent that answers an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocated {
    /// A new extent.
    Fresh(LentExtent),
    /// An extent that the space already had.
    Held(LentExtent),
}

/// A record that contradicts the others or the memory's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// An extent on pages of another extent, or on pages that do not exist.
    #[error("extent {0} lies on pages that are not free")]
    Overlap(ExtentId),
    /// An extent of a space that is not recorded.
    #[error("extent {0} belongs to space {1}, of which nothing is known")]
    UnknownSpace(ExtentId, SpaceId),
    /// Two extents with one id or for one member of one segment, or an id not given yet.
    #[error("extent {0} cannot be: its number or its place in the space is another's")]
    Impossible(ExtentId),
}

/// The extents of one donor, their owners, leases and fences.
#[derive(Debug)]
pub struct Table {
    limits: TableLimits,
    pages: FreePages,
    spaces: BTreeMap<SpaceId, Space>,
    /// Extents that no space has, and whose pages are not free yet.
    leaving: BTreeMap<ExtentId, LentExtent>,
    lent: usize,
    lent_pages: u64,
    parked: Parked,
    /// Most pages that may be lent from now on.
    limit_pages: u64,
    next: ExtentId,
}

#[derive(Debug)]
struct Space {
    fence: Epoch,
    lease_ms: u64,
    consumer: String,
    owner: Option<NodeDigest>,
    heard_ms: u64,
    connections: u32,
    extents: BTreeMap<ExtentId, LentExtent>,
    members: BTreeMap<(u64, u8), ExtentId>,
    asked: Asked,
}

impl Table {
    /// Creates a table in which all memory is free.
    pub fn new(zones: &[Zone], limits: TableLimits) -> Table {
        Table {
            limits,
            pages: FreePages::new(zones),
            spaces: BTreeMap::new(),
            leaving: BTreeMap::new(),
            lent: 0,
            lent_pages: 0,
            parked: Parked::default(),
            limit_pages: zones.iter().map(|zone| zone.pages).sum(),
            next: ExtentId(1),
        }
    }

    /// Restores a predecessor's table from its records. Every space counts as heard of now: without
    /// a donor, no borrower could be heard.
    pub fn restore(
        zones: &[Zone],
        limits: TableLimits,
        next: ExtentId,
        spaces: impl IntoIterator<Item = SpaceRecord>,
        extents: impl IntoIterator<Item = LentExtent>,
        now_ms: u64,
    ) -> Result<Table, RestoreError> {
        let mut table = Table::new(zones, limits);
        table.next = next;
        for record in spaces {
            table.spaces.insert(record.space, Space::new(&record, now_ms));
        }
        for lent in extents {
            let space = table
                .spaces
                .get_mut(&lent.space)
                .ok_or(RestoreError::UnknownSpace(lent.extent, lent.space))?;
            let taken = table.pages.take_at(lent.first_page, lent.order);
            taken.ok_or(RestoreError::Overlap(lent.extent))?;
            let is_known = space.extents.insert(lent.extent, lent).is_some()
                | space.members.insert((lent.segment, lent.member), lent.extent).is_some();
            if is_known || lent.extent >= next {
                return Err(RestoreError::Impossible(lent.extent));
            }
            table.lent += 1;
            table.lent_pages += 1 << lent.order;
        }
        Ok(table)
    }

    /// Connects a borrower, whose lease becomes the space's.
    pub fn hello(
        &mut self,
        space: SpaceId,
        epoch: Epoch,
        lease_ms: u64,
        consumer: &str,
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let lease_ms = lease_ms.clamp(MIN_LEASE_MS, MAX_LEASE_MS);
        if let Some(known) = self.spaces.get_mut(&space) {
            check_epoch(known.fence, epoch)?;
            known.lease_ms = lease_ms;
            known.heard_ms = now_ms;
            known.connections += 1;
            return Ok(());
        }
        if self.spaces.len() >= self.limits.spaces {
            return Err(Refusal::Busy);
        }
        let consumer = consumer.to_owned();
        let record = SpaceRecord { space, fence: Epoch(0), lease_ms, consumer, owner: None };
        self.spaces.insert(space, Space { connections: 1, ..Space::new(&record, now_ms) });
        Ok(())
    }

    /// Connects a node that may only read another node's space. The lease stays as it is.
    pub fn visit(&mut self, space: SpaceId, epoch: Epoch) -> Result<(), Refusal> {
        let known = self.spaces.get_mut(&space).ok_or(Refusal::NoSuchExtent)?;
        check_epoch(known.fence, epoch)?;
        known.connections += 1;
        Ok(())
    }

    /// Makes `owner` the space's owner and sets the lease that it asks for. Before, any node may
    /// have set another one.
    pub fn own(&mut self, space: SpaceId, owner: NodeDigest, lease_ms: u64) {
        if let Some(known) = self.spaces.get_mut(&space) {
            known.owner = Some(owner);
            known.lease_ms = lease_ms.clamp(MIN_LEASE_MS, MAX_LEASE_MS);
        }
    }

    /// Closes a connection of the space. Its extents stay until their lease runs out.
    pub fn bye(&mut self, space: SpaceId) {
        if let Some(known) = self.spaces.get_mut(&space) {
            known.connections -= 1;
        }
    }

    /// Lends an extent for one member of one segment, or returns the existing one.
    pub fn allocate(
        &mut self,
        space: SpaceId,
        epoch: Epoch,
        (segment, member): (u64, u8),
        order: u8,
        now_ms: u64,
    ) -> Result<Allocated, Refusal> {
        let in_use = self.lent + self.leaving.len();
        let lendable_pages = self.lendable_pages();
        let known = admit(&mut self.spaces, space, epoch, now_ms)?;
        if let Some(extent) = known.members.get(&(segment, member)) {
            let held = known.extents[extent];
            return match held.order == order {
                true => Ok(Allocated::Held(held)),
                false => Err(Refusal::OutOfBounds),
            };
        }
        // Page numbers on the wire have 32 bits.
        if order < self.limits.min_order || order > 32 {
            return Err(Refusal::OutOfBounds);
        }
        if in_use >= self.limits.extents || lendable_pages < 1 << order {
            return Err(Refusal::Full);
        }
        let first_page = self.pages.take(order).ok_or(Refusal::Full)?;
        let lent = LentExtent { extent: self.next, space, segment, member, order, first_page };
        self.next.0 += 1;
        self.lent += 1;
        self.lent_pages += 1 << order;
        known.extents.insert(lent.extent, lent);
        known.members.insert((segment, member), lent.extent);
        Ok(Allocated::Fresh(lent))
    }

    /// Frees an extent; it is *leaving* until [`Table::reclaimed`].
    pub fn free(
        &mut self,
        space: SpaceId,
        epoch: Epoch,
        extent: ExtentId,
        now_ms: u64,
    ) -> Result<LentExtent, Refusal> {
        let known = admit(&mut self.spaces, space, epoch, now_ms)?;
        let lent = known.extents.remove(&extent).ok_or(Refusal::NoSuchExtent)?;
        known.members.remove(&(lent.segment, lent.member));
        known.asked.gave(now_ms);
        self.leaving.insert(extent, lent);
        self.parked.remove(extent);
        self.lent -= 1;
        self.lent_pages -= 1 << lent.order;
        self.review(now_ms);
        Ok(lent)
    }

    /// Frees all extents of the space; they are *leaving* until [`Table::reclaimed`].
    pub fn free_all(
        &mut self,
        space: SpaceId,
        epoch: Epoch,
        now_ms: u64,
    ) -> Result<Vec<LentExtent>, Refusal> {
        admit(&mut self.spaces, space, epoch, now_ms)?;
        Ok(self.take_all(space, now_ms))
    }

    /// Lists the space's extents by rising id, starting at `from`, at most `most` of them.
    pub fn list(
        &mut self,
        space: SpaceId,
        epoch: Epoch,
        from: ExtentId,
        most: usize,
        now_ms: u64,
    ) -> Result<impl Iterator<Item = LentExtent>, Refusal> {
        let known = admit(&mut self.spaces, space, epoch, now_ms)?;
        Ok(known.extents.range(from..).take(most).map(|(_, lent)| *lent))
    }

    /// Makes `epoch` the oldest epoch that is served for the space.
    pub fn fence(&mut self, space: SpaceId, epoch: Epoch, now_ms: u64) -> Result<(), Refusal> {
        admit(&mut self.spaces, space, epoch, now_ms)?.fence = epoch;
        Ok(())
    }

    /// Records a sign of life.
    pub fn renew(&mut self, space: SpaceId, epoch: Epoch, now_ms: u64) -> Result<(), Refusal> {
        admit(&mut self.spaces, space, epoch, now_ms).map(drop)
    }

    /// Finds the pages of an extent, for a request that reads, writes or discards some.
    pub fn locate(
        &mut self,
        space: SpaceId,
        epoch: Epoch,
        extent: ExtentId,
        now_ms: u64,
    ) -> Result<LentExtent, Refusal> {
        let known = admit(&mut self.spaces, space, epoch, now_ms)?;
        known.extents.get(&extent).copied().ok_or(Refusal::NoSuchExtent)
    }

    /// Records that requests of the space were served until `at_ms` without this table.
    pub fn heard(&mut self, space: SpaceId, at_ms: u64) {
        if let Some(known) = self.spaces.get_mut(&space) {
            known.heard_ms = known.heard_ms.max(at_ms);
        }
    }

    /// Spaces with extents whose lease has run out.
    pub fn due(&self, now_ms: u64) -> Vec<SpaceId> {
        let is_due = |space: &Space| !space.extents.is_empty() && space.is_silent(now_ms);
        self.spaces.iter().filter(|(_, space)| is_due(space)).map(|(&id, _)| id).collect()
    }

    /// Takes a space's extents if its lease has run out; they are *leaving* until
    /// [`Table::reclaimed`].
    pub fn expire(&mut self, space: SpaceId, now_ms: u64) -> Vec<LentExtent> {
        match self.spaces.get(&space) {
            Some(known) if known.is_silent(now_ms) => self.take_all(space, now_ms),
            _ => Vec::new(),
        }
    }

    /// Forgets idle spaces whose lease, and fence time if fenced, have passed; returns their ids.
    pub fn forget(&mut self, now_ms: u64) -> Vec<SpaceId> {
        let forgotten = |space: &Space| {
            let kept_ms = if space.fence == Epoch(0) { 0 } else { FENCE_KEPT_MS };
            space.connections == 0
                && space.extents.is_empty()
                && space.is_silent(now_ms.saturating_sub(kept_ms))
        };
        let gone = self.spaces.iter().filter(|(_, space)| forgotten(space)).map(|(&id, _)| id);
        let gone: Vec<_> = gone.collect();
        self.spaces.retain(|_, space| !forgotten(space));
        gone
    }

    /// Frees the pages of a leaving extent, which are unused and empty by now.
    ///
    /// # Panics
    /// If the extent is not leaving.
    pub fn reclaimed(&mut self, extent: ExtentId) {
        let lent = self.leaving.remove(&extent).expect("only what is leaving is reclaimed");
        self.pages.give_back(lent.first_page, lent.order);
    }

    /// Record of a space, if it is known.
    pub fn space(&self, space: SpaceId) -> Option<SpaceRecord> {
        self.spaces.get(&space).map(|known| known.record(space))
    }

    /// All spaces and their use of memory.
    pub fn spaces(&self) -> impl Iterator<Item = SpaceUse> {
        self.spaces.iter().map(|(&id, space)| SpaceUse {
            record: space.record(id),
            extents: space.extents.len(),
            pages: space.extents.values().map(|lent| 1u64 << lent.order).sum(),
            recalled: space.asked.extents,
            heard_ms: space.heard_ms,
        })
    }

    /// All extents that are lent.
    pub fn extents(&self) -> impl Iterator<Item = &LentExtent> {
        self.spaces.values().flat_map(|space| space.extents.values())
    }

    /// Id of the next extent.
    pub fn next_extent(&self) -> ExtentId {
        self.next
    }

    /// Free pages.
    pub fn free_pages(&self) -> u64 {
        self.pages.count()
    }

    /// The zones, each with its number of free pages.
    pub fn zones(&self) -> impl Iterator<Item = (Zone, u64)> {
        self.pages.zones()
    }

    /// Pages that are neither lent nor free yet.
    pub fn leaving_pages(&self) -> u64 {
        self.leaving.values().map(|lent| 1u64 << lent.order).sum()
    }

    /// Checks the invariants. For tests and simulations: it looks at every extent.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn assert_consistent(&self) {
        let mut taken: Vec<_> = self.extents().chain(self.leaving.values()).collect();
        taken.sort_by_key(|lent| lent.first_page);
        for pair in taken.windows(2) {
            let apart = pair[0].pages().end <= pair[1].first_page;
            assert!(apart, "{:?} and {:?} overlap", pair[0], pair[1]);
        }
        let mut first_page = 0;
        for (zone, free_pages) in self.zones() {
            let pages = first_page..first_page + zone.pages;
            let within = taken.iter().filter(|lent| pages.contains(&lent.first_page));
            let lent_pages: u64 = within.map(|lent| 1u64 << lent.order).sum();
            assert_eq!(lent_pages, zone.pages - free_pages);
            first_page = pages.end;
        }
        let mut ids: Vec<_> = taken.iter().map(|lent| lent.extent).collect();
        ids.sort();
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "an id stands twice");
        assert!(ids.last().is_none_or(|&last| last < self.next), "an id from the future");
        assert_eq!(self.lent, self.extents().count());
        let lent_pages: u64 = self.extents().map(|lent| 1u64 << lent.order).sum();
        assert_eq!(self.lent_pages, lent_pages);
        self.assert_enough_is_asked();
        self.assert_parked_are_lent();
        for (&id, space) in &self.spaces {
            assert_eq!(space.members.len(), space.extents.len());
            for (&(segment, member), extent) in &space.members {
                let lent = space.extents[extent];
                assert_eq!((lent.space, lent.segment, lent.member), (id, segment, member));
            }
        }
    }

    fn take_all(&mut self, space: SpaceId, now_ms: u64) -> Vec<LentExtent> {
        let Some(known) = self.spaces.get_mut(&space) else { return Vec::new() };
        known.members.clear();
        let taken = std::mem::take(&mut known.extents);
        self.lent -= taken.len();
        self.lent_pages -= taken.values().map(|lent| 1u64 << lent.order).sum::<u64>();
        taken.keys().for_each(|&extent| self.parked.remove(extent));
        self.leaving.extend(taken.iter());
        self.review(now_ms);
        taken.into_values().collect()
    }
}

impl Space {
    fn new(record: &SpaceRecord, now_ms: u64) -> Space {
        Space {
            fence: record.fence,
            lease_ms: record.lease_ms,
            consumer: record.consumer.clone(),
            owner: record.owner,
            heard_ms: now_ms,
            connections: 0,
            extents: BTreeMap::new(),
            members: BTreeMap::new(),
            asked: Asked::default(),
        }
    }

    fn record(&self, space: SpaceId) -> SpaceRecord {
        SpaceRecord {
            space,
            fence: self.fence,
            lease_ms: self.lease_ms,
            consumer: self.consumer.clone(),
            owner: self.owner,
        }
    }

    fn is_silent(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.heard_ms) >= self.lease_ms
    }
}

/// Returns the space if the epoch may act on it, and records a sign of life.
fn admit(
    spaces: &mut BTreeMap<SpaceId, Space>,
    space: SpaceId,
    epoch: Epoch,
    now_ms: u64,
) -> Result<&mut Space, Refusal> {
    let known = spaces.get_mut(&space).ok_or(Refusal::NoSuchExtent)?;
    check_epoch(known.fence, epoch)?;
    known.heard_ms = known.heard_ms.max(now_ms);
    Ok(known)
}
