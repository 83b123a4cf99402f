//! Who has what of a donor's memory: the state machine behind every control request.
//!
//! Pure: time comes in as milliseconds since any fixed moment, and what is to be done to the memory
//! goes out as values. The donor drives it under a lock, and the cluster simulation drives the same
//! code from a seed. Maps are ordered, so that one seed always gives one run.
//!
//! An extent's life: *lent* by [`Table::allocate`] → *leaving* when it was freed or its lease ran
//! out: nobody may use it any more, but its pages are not free yet, because a read may still be
//! sending them and the host has not got the memory back → gone, with [`Table::reclaimed`].
//!
//! Invariants ([`Table::assert_consistent`] checks them):
//! 1. Extents that are lent or leaving do not overlap, and their pages are exactly those that the
//!    allocators count as lent.
//! 2. A space has at most one extent for each member of each segment.
//! 3. An id is never given twice, and ids rise.
//! 4. The fence of a space never falls while the space is known, and it is known while it has an
//!    extent or a connection, and for [`FENCE_KEPT_MS`] after its lease if it was ever fenced.

use hecaton_memory::buddy::Buddy;
use hecaton_memory::{Epoch, ExtentId, SpaceId};
use hecaton_transport::protocol::{HeldExtent, Refusal};
use std::collections::BTreeMap;
use std::ops::Range;

/// The shortest lease. What a borrower asks for below is raised to it: a lease must outlast a pause
/// of the borrower's host that is no failure.
pub const MIN_LEASE_MS: u64 = 1_000;

/// The longest lease: memory of a borrower that died must come back some time.
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

/// A run of the donor's pages that lies on one NUMA node. Zones follow one another from page 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    /// How many pages.
    pub pages: u64,
    /// The NUMA node, where the host has several.
    pub node: Option<u32>,
}

/// An extent and its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentExtent {
    /// Its number.
    pub extent: ExtentId,
    /// Whose it is.
    pub space: SpaceId,
    /// The segment that it serves.
    pub segment: u64,
    /// Which copy or shard of the segment.
    pub member: u8,
    /// Its size as a power of two of pages.
    pub order: u8,
    /// Where in the donor's memory it begins.
    pub first_page: u64,
}

impl LentExtent {
    /// The donor's pages that it covers.
    pub fn pages(&self) -> Range<u64> {
        self.first_page..self.first_page + (1 << self.order)
    }

    /// The donor's page behind a page of the extent.
    pub fn page(&self, page: u32) -> Result<u64, Refusal> {
        if u64::from(page) >> self.order != 0 {
            return Err(Refusal::OutOfBounds);
        }
        Ok(self.first_page + u64::from(page))
    }

    /// The donor's pages behind a run of the extent's.
    pub fn run(&self, first: u32, count: u32) -> Result<Range<u64>, Refusal> {
        let end = u64::from(first) + u64::from(count);
        if end > 1 << self.order {
            return Err(Refusal::OutOfBounds);
        }
        Ok(self.first_page + u64::from(first)..self.first_page + end)
    }

    /// As the borrower is told of it, with how many of its pages were written.
    pub fn line(&self, written: u32) -> HeldExtent {
        HeldExtent {
            extent: self.extent,
            segment: self.segment,
            member: self.member,
            order: self.order,
            written,
        }
    }
}

/// Refuses what comes with an older epoch than the space's fence. The one place that compares them.
pub fn check_epoch(fence: Epoch, epoch: Epoch) -> Result<(), Refusal> {
    if epoch < fence { Err(Refusal::StaleEpoch(fence)) } else { Ok(()) }
}

/// What is known of a space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceRecord {
    /// The space.
    pub space: SpaceId,
    /// The oldest epoch that is served.
    pub fence: Epoch,
    /// How long its extents stay without a sign of life.
    pub lease_ms: u64,
    /// Its consumer's name, for people.
    pub consumer: String,
}

/// A space and what it has, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceUse {
    /// What is known of it.
    pub record: SpaceRecord,
    /// Extents lent to it.
    pub extents: usize,
    /// Pages in them.
    pub pages: u64,
    /// When it was last heard of.
    pub heard_ms: u64,
}

/// The extent that an allocation is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocated {
    /// It was carved now.
    Fresh(LentExtent),
    /// The space had it already.
    Held(LentExtent),
}

/// A record that contradicts the others or the memory's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// An extent on pages that are another's, or that do not exist.
    #[error("extent {0} lies on pages that are not free")]
    Overlap(ExtentId),
    /// An extent of a space that is not recorded.
    #[error("extent {0} belongs to space {1}, of which nothing is known")]
    UnknownSpace(ExtentId, SpaceId),
    /// Two extents with one number, or for one member of one segment, or a number not given yet.
    #[error("extent {0} cannot be: its number or its place in the space is another's")]
    Impossible(ExtentId),
}

/// The extents of one donor, their owners, leases and fences.
#[derive(Debug)]
pub struct Table {
    limits: TableLimits,
    zones: Vec<ZonePages>,
    spaces: BTreeMap<SpaceId, Space>,
    /// Extents that are nobody's, and whose pages are not free yet.
    leaving: BTreeMap<ExtentId, LentExtent>,
    lent: usize,
    next: ExtentId,
}

#[derive(Debug)]
struct ZonePages {
    first_page: u64,
    node: Option<u32>,
    buddy: Buddy,
}

#[derive(Debug)]
struct Space {
    fence: Epoch,
    lease_ms: u64,
    consumer: String,
    heard_ms: u64,
    connections: u32,
    extents: BTreeMap<ExtentId, LentExtent>,
    members: BTreeMap<(u64, u8), ExtentId>,
}

impl Table {
    /// A table of memory that is all free.
    pub fn new(zones: &[Zone], limits: TableLimits) -> Table {
        let mut first_page = 0;
        let zones = zones.iter().map(|zone| {
            let buddy = Buddy::new(zone.pages);
            let zone = ZonePages { first_page, node: zone.node, buddy };
            first_page += zone.buddy.pages();
            zone
        });
        Table {
            limits,
            zones: zones.collect(),
            spaces: BTreeMap::new(),
            leaving: BTreeMap::new(),
            lent: 0,
            next: ExtentId(1),
        }
    }

    /// The table of a predecessor, from its records. Every space counts as heard of now: while no
    /// donor was there, nobody could be heard.
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
            let zone = table.zones.iter_mut().rfind(|zone| zone.first_page <= lent.first_page);
            let zone = zone.ok_or(RestoreError::Overlap(lent.extent))?;
            zone.buddy
                .reserve(lent.first_page - zone.first_page, lent.order)
                .map_err(|_| RestoreError::Overlap(lent.extent))?;
            let is_known = space.extents.insert(lent.extent, lent).is_some()
                | space.members.insert((lent.segment, lent.member), lent.extent).is_some();
            if is_known || lent.extent >= next {
                return Err(RestoreError::Impossible(lent.extent));
            }
            table.lent += 1;
        }
        Ok(table)
    }

    /// A borrower connects. The lease is the space's from now on.
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
        let record = SpaceRecord { space, fence: Epoch(0), lease_ms, consumer };
        self.spaces.insert(space, Space { connections: 1, ..Space::new(&record, now_ms) });
        Ok(())
    }

    /// A connection of the space has ended. Its extents stay until their lease runs out.
    pub fn bye(&mut self, space: SpaceId) {
        if let Some(known) = self.spaces.get_mut(&space) {
            known.connections -= 1;
        }
    }

    /// An extent for one member of one segment: a new one, or the one that is there.
    pub fn allocate(
        &mut self,
        space: SpaceId,
        epoch: Epoch,
        (segment, member): (u64, u8),
        order: u8,
        now_ms: u64,
    ) -> Result<Allocated, Refusal> {
        let in_use = self.lent + self.leaving.len();
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
        if in_use >= self.limits.extents {
            return Err(Refusal::Full);
        }
        let first_page = carve(&mut self.zones, order).ok_or(Refusal::Full)?;
        let lent = LentExtent { extent: self.next, space, segment, member, order, first_page };
        self.next.0 += 1;
        self.lent += 1;
        known.extents.insert(lent.extent, lent);
        known.members.insert((segment, member), lent.extent);
        Ok(Allocated::Fresh(lent))
    }

    /// An extent goes back; it is *leaving* until [`Table::reclaimed`].
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
        self.leaving.insert(extent, lent);
        self.lent -= 1;
        Ok(lent)
    }

    /// All extents of the space go back; they are *leaving* until [`Table::reclaimed`].
    pub fn free_all(
        &mut self,
        space: SpaceId,
        epoch: Epoch,
        now_ms: u64,
    ) -> Result<Vec<LentExtent>, Refusal> {
        admit(&mut self.spaces, space, epoch, now_ms)?;
        Ok(self.take_all(space))
    }

    /// The space's extents by rising id, from `from` on, at most `most` of them.
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

    /// Makes `epoch` the oldest that is served for the space.
    pub fn fence(&mut self, space: SpaceId, epoch: Epoch, now_ms: u64) -> Result<(), Refusal> {
        admit(&mut self.spaces, space, epoch, now_ms)?.fence = epoch;
        Ok(())
    }

    /// A sign of life.
    pub fn renew(&mut self, space: SpaceId, epoch: Epoch, now_ms: u64) -> Result<(), Refusal> {
        admit(&mut self.spaces, space, epoch, now_ms).map(drop)
    }

    /// Where the pages of an extent are, for a request that reads, writes or discards some.
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

    /// Requests of the space were served up to that moment without asking this table.
    pub fn heard(&mut self, space: SpaceId, at_ms: u64) {
        if let Some(known) = self.spaces.get_mut(&space) {
            known.heard_ms = known.heard_ms.max(at_ms);
        }
    }

    /// Spaces that have extents and whose lease has run out.
    pub fn due(&self, now_ms: u64) -> Vec<SpaceId> {
        let is_due = |space: &Space| !space.extents.is_empty() && space.is_silent(now_ms);
        self.spaces.iter().filter(|(_, space)| is_due(space)).map(|(&id, _)| id).collect()
    }

    /// Takes a space's extents if its lease has run out; they are *leaving* until
    /// [`Table::reclaimed`].
    pub fn expire(&mut self, space: SpaceId, now_ms: u64) -> Vec<LentExtent> {
        match self.spaces.get(&space) {
            Some(known) if known.is_silent(now_ms) => self.take_all(space),
            _ => Vec::new(),
        }
    }

    /// Forgets the spaces of which nothing is left to know, and says which.
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

    /// Nobody uses the extent's pages any more, and they hold nothing: they are free.
    ///
    /// # Panics
    /// If the extent is not leaving.
    pub fn reclaimed(&mut self, extent: ExtentId) {
        let lent = self.leaving.remove(&extent).expect("only what is leaving is reclaimed");
        let zone = self.zones.iter_mut().rfind(|zone| zone.first_page <= lent.first_page);
        let zone = zone.expect("an extent lies in a zone");
        let freed = zone.buddy.free(lent.first_page - zone.first_page, lent.order);
        freed.expect("a leaving extent's pages are lent");
    }

    /// What is known of a space.
    pub fn space(&self, space: SpaceId) -> Option<SpaceRecord> {
        self.spaces.get(&space).map(|known| known.record(space))
    }

    /// All spaces and what they have.
    pub fn spaces(&self) -> impl Iterator<Item = SpaceUse> {
        self.spaces.iter().map(|(&id, space)| SpaceUse {
            record: space.record(id),
            extents: space.extents.len(),
            pages: space.extents.values().map(|lent| 1u64 << lent.order).sum(),
            heard_ms: space.heard_ms,
        })
    }

    /// All extents that are lent.
    pub fn extents(&self) -> impl Iterator<Item = &LentExtent> {
        self.spaces.values().flat_map(|space| space.extents.values())
    }

    /// The number that the next extent will have.
    pub fn next_extent(&self) -> ExtentId {
        self.next
    }

    /// Pages that could be lent.
    pub fn free_pages(&self) -> u64 {
        self.zones.iter().map(|zone| zone.buddy.free_pages()).sum()
    }

    /// The zones, and how many pages of each could be lent.
    pub fn zones(&self) -> impl Iterator<Item = (Zone, u64)> {
        self.zones.iter().map(|zone| {
            let free_pages = zone.buddy.free_pages();
            (Zone { pages: zone.buddy.pages(), node: zone.node }, free_pages)
        })
    }

    /// Pages that are neither lent nor free yet.
    pub fn leaving_pages(&self) -> u64 {
        self.leaving.values().map(|lent| 1u64 << lent.order).sum()
    }

    /// Checks the invariants. For tests and simulations: it looks at every extent.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn assert_consistent(&self) {
        let mut taken: Vec<_> = self.extents().chain(self.leaving.values()).collect();
        taken.sort_by_key(|lent| lent.first_page);
        for pair in taken.windows(2) {
            let apart = pair[0].pages().end <= pair[1].first_page;
            assert!(apart, "{:?} and {:?} overlap", pair[0], pair[1]);
        }
        for zone in &self.zones {
            let pages = zone.first_page..zone.first_page + zone.buddy.pages();
            let within = taken.iter().filter(|lent| pages.contains(&lent.first_page));
            let lent_pages: u64 = within.map(|lent| 1u64 << lent.order).sum();
            assert_eq!(lent_pages, zone.buddy.pages() - zone.buddy.free_pages());
        }
        let mut ids: Vec<_> = taken.iter().map(|lent| lent.extent).collect();
        ids.sort();
        assert!(ids.windows(2).all(|pair| pair[0] != pair[1]), "an id stands twice");
        assert!(ids.last().is_none_or(|&last| last < self.next), "an id from the future");
        assert_eq!(self.lent, self.extents().count());
        for (&id, space) in &self.spaces {
            assert_eq!(space.members.len(), space.extents.len());
            for (&(segment, member), extent) in &space.members {
                let lent = space.extents[extent];
                assert_eq!((lent.space, lent.segment, lent.member), (id, segment, member));
            }
        }
    }

    fn take_all(&mut self, space: SpaceId) -> Vec<LentExtent> {
        let Some(known) = self.spaces.get_mut(&space) else { return Vec::new() };
        known.members.clear();
        let taken = std::mem::take(&mut known.extents);
        self.lent -= taken.len();
        self.leaving.extend(taken.iter());
        taken.into_values().collect()
    }
}

impl Space {
    fn new(record: &SpaceRecord, now_ms: u64) -> Space {
        Space {
            fence: record.fence,
            lease_ms: record.lease_ms,
            consumer: record.consumer.clone(),
            heard_ms: now_ms,
            connections: 0,
            extents: BTreeMap::new(),
            members: BTreeMap::new(),
        }
    }

    fn record(&self, space: SpaceId) -> SpaceRecord {
        SpaceRecord {
            space,
            fence: self.fence,
            lease_ms: self.lease_ms,
            consumer: self.consumer.clone(),
        }
    }

    fn is_silent(&self, now_ms: u64) -> bool {
        now_ms.saturating_sub(self.heard_ms) >= self.lease_ms
    }
}

/// The space, if the epoch may act on it; that is a sign of life.
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

/// Takes pages from the zone that has the most free ones, so that the nodes' memory controllers
/// share the load.
fn carve(zones: &mut [ZonePages], order: u8) -> Option<u64> {
    let fits = |zone: &&mut ZonePages| zone.buddy.largest_free_order() >= Some(order);
    let zone = zones.iter_mut().filter(fits).max_by_key(|zone| zone.buddy.free_pages())?;
    zone.buddy.allocate(order).map(|first| zone.first_page + first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: TableLimits = TableLimits { extents: 20, spaces: 4, min_order: 1 };
    const A: SpaceId = SpaceId(0xa);
    const B: SpaceId = SpaceId(0xb);
    const LEASE_MS: u64 = 10_000;

    fn table() -> Table {
        let zones = [Zone { pages: 64, node: Some(0) }, Zone { pages: 40, node: Some(1) }];
        let mut table = Table::new(&zones, LIMITS);
        table.hello(A, Epoch(5), LEASE_MS, "a", 0).unwrap();
        table.hello(B, Epoch(1), LEASE_MS, "b", 0).unwrap();
        table
    }

    fn fresh(allocated: Result<Allocated, Refusal>) -> LentExtent {
        match allocated {
            Ok(Allocated::Fresh(lent)) => lent,
            other => panic!("{other:?} is no fresh extent"),
        }
    }

    #[test]
    fn allocating_twice_gives_the_same_extent() {
        let mut table = table();
        let lent = fresh(table.allocate(A, Epoch(5), (7, 1), 3, 0));
        let again = table.allocate(A, Epoch(5), (7, 1), 3, 0);
        assert_eq!(again, Ok(Allocated::Held(lent)));
        let larger = table.allocate(A, Epoch(5), (7, 1), 4, 0);
        assert_eq!(larger, Err(Refusal::OutOfBounds));
        assert_ne!(fresh(table.allocate(B, Epoch(5), (7, 1), 3, 0)).extent, lent.extent);
    }

    #[test]
    fn spreads_over_the_nodes_and_is_full_when_both_are() {
        let mut table = table();
        let nodes = (0..).map_while(|segment| {
            let lent = match table.allocate(A, Epoch(5), (segment, 0), 3, 0) {
                Ok(Allocated::Fresh(lent)) => lent,
                refused => {
                    assert_eq!(refused, Err(Refusal::Full));
                    return None;
                }
            };
            Some(u32::from(lent.first_page >= 64))
        });
        let nodes: Vec<_> = nodes.collect();
        assert_eq!(nodes.len(), 13);
        assert_eq!(nodes.iter().sum::<u32>(), 5);
        assert_eq!(table.free_pages(), 0);
    }

    #[test]
    fn refuses_what_it_does_not_carve() {
        let mut table = table();
        for order in [0, 33, 255] {
            let refused = table.allocate(A, Epoch(5), (0, 0), order, 0);
            assert_eq!(refused, Err(Refusal::OutOfBounds), "order {order}");
        }
        assert_eq!(table.allocate(A, Epoch(5), (0, 0), 7, 0), Err(Refusal::Full));
    }

    #[test]
    fn extents_are_bounded_in_number_leaving_ones_included() {
        let mut table = table();
        for segment in 0..20 {
            fresh(table.allocate(A, Epoch(5), (segment, 0), 1, 0));
        }
        assert_eq!(table.allocate(A, Epoch(5), (20, 0), 1, 0), Err(Refusal::Full));
        let lent = table.free(A, Epoch(5), ExtentId(1), 0).unwrap();
        assert_eq!(table.allocate(A, Epoch(5), (20, 0), 1, 0), Err(Refusal::Full));
        table.reclaimed(lent.extent);
        assert_eq!(fresh(table.allocate(A, Epoch(5), (20, 0), 1, 0)).extent, ExtentId(21));
    }

    #[test]
    fn a_fence_shuts_out_older_epochs_and_only_those() {
        let mut table = table();
        let lent = fresh(table.allocate(A, Epoch(5), (0, 0), 1, 0));
        table.fence(A, Epoch(6), 1).unwrap();
        let stale = Refusal::StaleEpoch(Epoch(6));
        assert_eq!(table.locate(A, Epoch(5), lent.extent, 2), Err(stale));
        assert_eq!(table.allocate(A, Epoch(5), (0, 0), 1, 2), Err(stale));
        assert_eq!(table.free(A, Epoch(5), lent.extent, 2), Err(stale));
        assert_eq!(table.free_all(A, Epoch(5), 2), Err(stale));
        assert_eq!(table.fence(A, Epoch(5), 2), Err(stale));
        assert_eq!(table.renew(A, Epoch(5), 2), Err(stale));
        assert_eq!(table.hello(A, Epoch(5), LEASE_MS, "a", 2), Err(stale));
        assert!(table.list(A, Epoch(5), ExtentId(0), 9, 2).is_err());
        assert_eq!(table.locate(A, Epoch(6), lent.extent, 2), Ok(lent));
        assert_eq!(table.locate(A, Epoch(7), lent.extent, 2), Ok(lent));
        // Being refused is no sign of life.
        assert_eq!(table.due(2 + LEASE_MS - 1), []);
        table.renew(A, Epoch(5), 2 + LEASE_MS - 1).unwrap_err();
        assert_eq!(table.due(2 + LEASE_MS), [A]);
    }

    #[test]
    fn another_spaces_extent_is_not_there() {
        let mut table = table();
        let lent = fresh(table.allocate(A, Epoch(5), (0, 0), 1, 0));
        assert_eq!(table.locate(B, Epoch(9), lent.extent, 0), Err(Refusal::NoSuchExtent));
        assert_eq!(table.free(B, Epoch(9), lent.extent, 0), Err(Refusal::NoSuchExtent));
        assert_eq!(table.locate(SpaceId(99), Epoch(9), lent.extent, 0), Err(Refusal::NoSuchExtent));
    }

    #[test]
    fn a_silent_space_loses_its_extents_and_then_its_name() {
        let mut table = table();
        let lent = fresh(table.allocate(A, Epoch(5), (0, 0), 1, 0));
        table.fence(A, Epoch(5), 0).unwrap();
        table.heard(A, 4_000);
        assert_eq!(table.expire(A, 4_000 + LEASE_MS - 1), []);
        assert_eq!(table.expire(A, 4_000 + LEASE_MS), [lent]);
        table.reclaimed(lent.extent);
        assert_eq!(table.free_pages(), 104);
        let late = 4_000 + LEASE_MS + FENCE_KEPT_MS;
        assert_eq!(table.forget(late), [], "both are connected");
        table.bye(A);
        table.bye(B);
        assert_eq!(table.forget(late - 1), [B]);
        assert_eq!(table.space(A).unwrap().fence, Epoch(5));
        assert_eq!(table.forget(late), [A]);
    }

    #[test]
    fn knows_no_more_spaces_than_its_limit() {
        let mut table = table();
        table.hello(SpaceId(1), Epoch(0), 0, "", 0).unwrap();
        table.hello(SpaceId(2), Epoch(0), u64::MAX, "", 0).unwrap();
        assert_eq!(table.hello(SpaceId(3), Epoch(0), 1, "", 0), Err(Refusal::Busy));
        assert_eq!(table.space(SpaceId(1)).unwrap().lease_ms, MIN_LEASE_MS);
        assert_eq!(table.space(SpaceId(2)).unwrap().lease_ms, MAX_LEASE_MS);
        table.hello(A, Epoch(5), LEASE_MS, "a", 0).unwrap();
    }

    #[test]
    fn pages_of_an_extent_are_bounded() {
        let lent = LentExtent {
            extent: ExtentId(1),
            space: A,
            segment: 0,
            member: 0,
            order: 3,
            first_page: 16,
        };
        assert_eq!((lent.page(0), lent.page(7)), (Ok(16), Ok(23)));
        assert_eq!(lent.page(8), Err(Refusal::OutOfBounds));
        assert_eq!(lent.page(u32::MAX), Err(Refusal::OutOfBounds));
        assert_eq!(lent.run(2, 6), Ok(18..24));
        assert_eq!(lent.run(2, 7), Err(Refusal::OutOfBounds));
        assert_eq!(lent.run(u32::MAX, u32::MAX), Err(Refusal::OutOfBounds));
        let largest = LentExtent { order: 32, first_page: 0, ..lent };
        assert_eq!(largest.page(u32::MAX), Ok(u64::from(u32::MAX)));
    }

    #[test]
    fn contradicting_records_are_refused() {
        let zones = [Zone { pages: 64, node: None }];
        let record =
            SpaceRecord { space: A, fence: Epoch(3), lease_ms: LEASE_MS, consumer: "a".into() };
        let lent = |extent, segment, first_page, space| LentExtent {
            extent: ExtentId(extent),
            space,
            segment,
            member: 0,
            order: 2,
            first_page,
        };
        let restore = |extents: &[LentExtent]| {
            let extents = extents.iter().copied();
            Table::restore(&zones, LIMITS, ExtentId(9), [record.clone()], extents, 0)
        };
        let table = restore(&[lent(1, 0, 0, A), lent(2, 1, 60, A)]).unwrap();
        table.assert_consistent();
        assert_eq!(table.free_pages(), 56);
        assert_eq!(table.space(A), Some(record.clone()));
        for (extents, error) in [
            (vec![lent(1, 0, 0, B)], RestoreError::UnknownSpace(ExtentId(1), B)),
            (vec![lent(1, 0, 0, A), lent(2, 1, 0, A)], RestoreError::Overlap(ExtentId(2))),
            (vec![lent(1, 0, 64, A)], RestoreError::Overlap(ExtentId(1))),
            (vec![lent(1, 0, 2, A)], RestoreError::Overlap(ExtentId(1))),
            (vec![lent(1, 0, 0, A), lent(1, 1, 4, A)], RestoreError::Impossible(ExtentId(1))),
            (vec![lent(1, 0, 0, A), lent(2, 0, 4, A)], RestoreError::Impossible(ExtentId(2))),
            (vec![lent(9, 0, 0, A)], RestoreError::Impossible(ExtentId(9))),
        ] {
            assert_eq!(restore(&extents).unwrap_err(), error);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Hello(u64, u64),
        Bye(u64),
        Allocate(u64, u64, u64, u8),
        Free(u64, u64, u64),
        FreeAll(u64, u64),
        Fence(u64, u64),
        Renew(u64, u64),
        Expire(u64),
        Reclaim,
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        let (space, epoch) = (0u64..6, 1u64..5);
        prop_oneof![
            2 => (space.clone(), epoch.clone()).prop_map(|(s, e)| Step::Hello(s, e)),
            1 => space.clone().prop_map(Step::Bye),
            8 => (space.clone(), epoch.clone(), 0u64..6, 0u8..6)
                .prop_map(|(s, e, segment, order)| Step::Allocate(s, e, segment, order)),
            3 => (space.clone(), epoch.clone(), 0u64..40).prop_map(|(s, e, x)| Step::Free(s, e, x)),
            1 => (space.clone(), epoch.clone()).prop_map(|(s, e)| Step::FreeAll(s, e)),
            1 => (space.clone(), epoch.clone()).prop_map(|(s, e)| Step::Fence(s, e)),
            1 => (space, epoch).prop_map(|(s, e)| Step::Renew(s, e)),
            2 => (0u64..LEASE_MS).prop_map(Step::Expire),
            3 => Just(Step::Reclaim),
            1 => Just(Step::Restart),
        ]
    }

    proptest! {
        /// The invariants hold whatever is asked, an epoch below the fence changes nothing, and a
        /// table restored from the records is the same table.
        #[test]
        fn any_requests_keep_it_consistent(steps in prop::collection::vec(step(), 0..150)) {
            let zones = [Zone { pages: 64, node: None }, Zone { pages: 23, node: None }];
            let mut table = Table::new(&zones, LIMITS);
            let mut connections: BTreeMap<u64, u32> = BTreeMap::new();
            let mut leaving = Vec::new();
            let mut now_ms = 0;
            for step in steps {
                let fence =
                    |table: &Table, space| table.space(SpaceId(space)).map(|known| known.fence);
                match step {
                    Step::Hello(s, e) => {
                        let fenced = fence(&table, s).is_some_and(|fence| fence > Epoch(e));
                        let welcome = table.hello(SpaceId(s), Epoch(e), LEASE_MS, "c", now_ms);
                        if welcome.is_ok() {
                            *connections.entry(s).or_default() += 1;
                        }
                        prop_assert!(!(fenced && welcome.is_ok()));
                    }
                    Step::Bye(s) => {
                        if let Some(count) = connections.get_mut(&s).filter(|count| **count > 0) {
                            *count -= 1;
                            table.bye(SpaceId(s));
                        }
                    }
                    Step::Allocate(s, e, segment, order) => {
                        let before = fence(&table, s);
                        let done = table.allocate(SpaceId(s), Epoch(e), (segment, 0), order, now_ms);
                        prop_assert!(done.is_err() || before.unwrap() <= Epoch(e));
                    }
                    Step::Free(s, e, x) => {
                        let before = fence(&table, s);
                        let done = table.free(SpaceId(s), Epoch(e), ExtentId(x), now_ms);
                        prop_assert!(done.is_err() || before.unwrap() <= Epoch(e));
                        leaving.extend(done);
                    }
                    Step::FreeAll(s, e) => {
                        let done = table.free_all(SpaceId(s), Epoch(e), now_ms);
                        leaving.extend(done.into_iter().flatten());
                    }
                    Step::Fence(s, e) => {
                        let before = fence(&table, s);
                        let done = table.fence(SpaceId(s), Epoch(e), now_ms);
                        prop_assert!(fence(&table, s) >= before);
                        prop_assert!(done.is_err() || fence(&table, s) == Some(Epoch(e)));
                    }
                    Step::Renew(s, e) => {
                        let _ = table.renew(SpaceId(s), Epoch(e), now_ms);
                    }
                    Step::Expire(after_ms) => {
                        now_ms += after_ms;
                        for space in table.due(now_ms) {
                            let taken = table.expire(space, now_ms);
                            prop_assert!(!taken.is_empty());
                            leaving.extend(taken);
                        }
                        for space in table.forget(now_ms) {
                            prop_assert_eq!(connections.get(&space.0).copied().unwrap_or(0), 0);
                        }
                    }
                    Step::Reclaim => {
                        if let Some(lent) = leaving.pop() {
                            table.reclaimed(lent.extent);
                        }
                    }
                    Step::Restart => {
                        let spaces: Vec<_> = table.spaces().map(|space| space.record).collect();
                        let extents: Vec<_> = table.extents().copied().collect();
                        let next = table.next_extent();
                        table = Table::restore(
                            &zones, LIMITS, next, spaces.clone(), extents.clone(), now_ms,
                        ).unwrap();
                        let again: Vec<_> = table.spaces().map(|space| space.record).collect();
                        prop_assert_eq!(spaces, again);
                        prop_assert!(extents.iter().eq(table.extents()));
                        leaving.clear();
                        connections.clear();
                    }
                }
                table.assert_consistent();
                prop_assert_eq!(
                    table.leaving_pages(),
                    leaving.iter().map(|lent| 1u64 << lent.order).sum::<u64>()
                );
            }
        }
    }
}
