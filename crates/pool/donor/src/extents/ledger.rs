//! The table's records in memory that outlives the process.
//!
//! The ledger is a memfd beside the arena's. A supervisor that holds both can give them to the next
//! process after this one was killed at any instruction; nothing that was answered is lost then.
//!
//! Crash consistency rests on one rule: a record counts while its first word is set. Its other
//! words are stored before that word is set and after it is cleared, with atomic stores in program
//! order. A fence, a lease and the next number are one word each and change in place. An owner is
//! three words, of which one counts in the same way. So a record is the old or the new one, with
//! one exception: a space that passes between owners may be found without one. Then it belongs to
//! the node that fences it next, and the later of the two epochs stays.
//!
//! A page that was being overwritten at that moment may be half new. Its write was not answered, so
//! that the borrower sends it again; until then the sum betrays it.

use crate::extents::layout::{self, Layout, extent, header, space};
use crate::extents::owner::NodeDigest;
use crate::extents::table::{LentExtent, SpaceRecord, Zone};
use crate::pages::zones::MAX_ZONES;
use hecaton_memory::memfd::MemoryError;
use hecaton_memory::words::SharedWords;
use hecaton_memory::{Epoch, ExtentId, Generation, SpaceId};
use hecaton_transport::protocol::MAX_NAME;
use std::collections::HashMap;
use std::hash::Hash;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Why a ledger cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Its memory cannot be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// It is not a ledger, or one of another build.
    #[error("the file handed over is no ledger of this version")]
    Foreign,
    /// A value in the ledger is impossible.
    #[error("the ledger handed over is damaged: its {0} cannot be")]
    Damaged(&'static str),
}

/// Records that a predecessor left in its ledger.
#[derive(Debug)]
pub(crate) struct Records {
    pub(crate) zones: Vec<Zone>,
    pub(crate) next: ExtentId,
    pub(crate) spaces: Vec<SpaceRecord>,
    pub(crate) extents: Vec<LentExtent>,
}

/// The writer of the records. There is one, under the same lock as the table.
#[derive(Debug)]
pub(crate) struct Ledger {
    words: Arc<SharedWords>,
    layout: Layout,
    spaces: Slots<SpaceId>,
    extents: Slots<ExtentId>,
    /// Every store in its order, for the test that cuts it short.
    #[cfg(test)]
    stores: std::cell::RefCell<Vec<(usize, u64)>>,
}

impl Ledger {
    /// A ledger with no records.
    pub(crate) fn create(
        name: &str,
        layout: Layout,
        zones: &[Zone],
        boot: u64,
    ) -> Result<Ledger, LedgerError> {
        assert!(zones.len() <= MAX_ZONES, "{} zones", zones.len());
        let words = SharedWords::create(name, layout.wide(), layout.pages as usize)?;
        let ledger = Ledger {
            words: Arc::new(words),
            layout,
            spaces: Slots::new(layout.limits.spaces),
            extents: Slots::new(layout.limits.extents),
            #[cfg(test)]
            stores: Default::default(),
        };
        ledger.set(header::PAGES, layout.pages);
        ledger.set(header::MIN_ORDER, layout.limits.min_order.into());
        ledger.set(header::BOOT, boot);
        ledger.set(header::NEXT_EXTENT, 1);
        ledger.set(header::ZONES, zones.len() as u64);
        for (index, zone) in zones.iter().enumerate() {
            let at = header::FIRST_ZONE + 2 * index;
            ledger.set(at, zone.pages);
            ledger.set(at + 1, zone.node.map_or(u64::MAX, u64::from));
        }
        ledger.set(header::MAGIC, layout::MAGIC);
        Ok(ledger)
    }

    /// A predecessor's ledger, and what stands in it.
    pub(crate) fn adopt(fd: OwnedFd) -> Result<(Ledger, Records), LedgerError> {
        // The header tells where the rest is, and so is looked at by itself first.
        let front = SharedWords::from_fd(fd.try_clone().map_err(clone_failed)?, header::WORDS)?;
        let word = |at: usize| front.wide()[at].load(Ordering::Acquire);
        if word(header::MAGIC) != layout::MAGIC {
            return Err(LedgerError::Foreign);
        }
        let pages = word(header::PAGES);
        let min_order = word(header::MIN_ORDER);
        if pages == 0 || pages >= 1 << 48 || min_order >= 32 {
            return Err(LedgerError::Damaged("size"));
        }
        let layout = Layout::new(pages, min_order as u8);
        let words = Arc::new(SharedWords::from_fd(fd, layout.wide())?);
        if words.wide().len() < layout.wide() || words.narrow().len() < pages as usize {
            return Err(LedgerError::Damaged("length"));
        }
        let mut ledger = Ledger {
            words,
            layout,
            spaces: Slots::new(layout.limits.spaces),
            extents: Slots::new(layout.limits.extents),
            #[cfg(test)]
            stores: Default::default(),
        };
        let records = ledger.read()?;
        Ok((ledger, records))
    }

    pub(crate) fn words(&self) -> &Arc<SharedWords> {
        &self.words
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    pub(crate) fn boot(&self) -> u64 {
        self.get(header::BOOT)
    }

    /// Enters a space, or changes its owner, fence and lease. The name stays as first entered: it
    /// is more than one word. A new owner is stored before its fence, which shuts out the earlier
    /// owner.
    pub(crate) fn put_space(&mut self, record: &SpaceRecord) {
        if let Some(slot) = self.spaces.find(record.space) {
            let at = self.layout.space(slot);
            if record.owner.is_some_and(|owner| self.owner(at) != Some(owner)) {
                self.put_owner(at, record);
            }
            self.set(at + space::FENCE, record.fence.0);
            self.set(at + space::LEASE_MS, record.lease_ms);
            return;
        }
        let slot = self.spaces.take(record.space);
        self.set(header::SPACES_USED, self.spaces.used as u64);
        let at = self.layout.space(slot);
        self.set(at + space::SPACE, record.space.0);
        self.set(at + space::FENCE, record.fence.0);
        self.set(at + space::LEASE_MS, record.lease_ms);
        let mut name = [0; MAX_NAME];
        let consumer = record.consumer.as_bytes();
        let fits = |&length: &usize| record.consumer.is_char_boundary(length);
        let name_bytes = (0..=consumer.len().min(MAX_NAME)).rfind(fits).unwrap_or(0);
        name[..name_bytes].copy_from_slice(&consumer[..name_bytes]);
        self.set(at + space::NAME_BYTES, name_bytes as u64);
        for (index, word) in name.as_chunks::<8>().0.iter().enumerate() {
            self.set(at + space::NAME + index, u64::from_le_bytes(*word));
        }
        self.put_owner(at, record);
        self.set(at + space::USED, 1);
    }

    fn put_owner(&self, at: usize, record: &SpaceRecord) {
        self.set(at + space::OWNER, 0);
        if let Some([first, second]) = record.owner.map(NodeDigest::words) {
            self.set(at + space::OWNED, record.space.0);
            self.set(at + space::OWNER + 1, second);
            self.set(at + space::OWNER, first);
        }
    }

    fn owner(&self, at: usize) -> Option<NodeDigest> {
        let is_of_this = self.get(at + space::OWNED) == self.get(at + space::SPACE);
        let words = [0, 1].map(|index| self.get(at + space::OWNER + index));
        NodeDigest::from_words(words).filter(|_| is_of_this)
    }

    pub(crate) fn remove_space(&mut self, space: SpaceId) {
        if let Some(slot) = self.spaces.release(space) {
            self.set(self.layout.space(slot) + space::USED, 0);
        }
    }

    /// Enters an extent, whose number is then never given again.
    pub(crate) fn put_extent(&mut self, lent: &LentExtent, generation: Generation) {
        self.set(header::NEXT_EXTENT, lent.extent.0 + 1);
        let slot = self.extents.take(lent.extent);
        self.set(header::EXTENTS_USED, self.extents.used as u64);
        let at = self.layout.extent(slot);
        let place = lent.first_page | u64::from(lent.order) << 48 | u64::from(lent.member) << 56;
        self.set(at + extent::SPACE, lent.space.0);
        self.set(at + extent::SEGMENT, lent.segment);
        self.set(at + extent::PLACE, place);
        self.set(at + extent::GENERATION, generation.0);
        self.set(at + extent::EXTENT, lent.extent.0);
    }

    /// The word that holds the generation of an extent that is entered.
    ///
    /// # Panics
    /// If it is not.
    pub(crate) fn generation_of(&self, extent: ExtentId) -> usize {
        let slot = self.extents.find(extent).expect("the extent is entered");
        self.layout.extent(slot) + extent::GENERATION
    }

    /// The generation of an extent that is entered.
    pub(crate) fn generation(&self, extent: ExtentId) -> Generation {
        Generation(self.get(self.generation_of(extent)))
    }

    pub(crate) fn remove_extent(&mut self, extent: ExtentId) {
        if let Some(slot) = self.extents.release(extent) {
            self.set(self.layout.extent(slot) + extent::EXTENT, 0);
        }
    }

    fn read(&mut self) -> Result<Records, LedgerError> {
        Ok(Records {
            zones: self.read_zones()?,
            next: ExtentId(self.get(header::NEXT_EXTENT)),
            spaces: self.read_spaces()?,
            extents: self.read_extents()?,
        })
    }

    fn read_zones(&self) -> Result<Vec<Zone>, LedgerError> {
        let count = self.get(header::ZONES) as usize;
        let damaged = LedgerError::Damaged("zones");
        if count > MAX_ZONES {
            return Err(damaged);
        }
        let zone = |index: usize| {
            let at = header::FIRST_ZONE + 2 * index;
            Zone { pages: self.get(at), node: u32::try_from(self.get(at + 1)).ok() }
        };
        let zones: Vec<_> = (0..count).map(zone).collect();
        let pages = zones.iter().try_fold(0u64, |pages, zone| pages.checked_add(zone.pages));
        if pages == Some(self.layout.pages) { Ok(zones) } else { Err(damaged) }
    }

    fn read_spaces(&mut self) -> Result<Vec<SpaceRecord>, LedgerError> {
        let damaged = || LedgerError::Damaged("spaces");
        let used = self.get(header::SPACES_USED) as usize;
        if used > self.layout.limits.spaces {
            return Err(damaged());
        }
        let mut records = Vec::new();
        for slot in 0..used {
            let at = self.layout.space(slot);
            if self.get(at + space::USED) == 0 {
                continue;
            }
            let name: Vec<u8> = (0..MAX_NAME / 8)
                .flat_map(|index| self.get(at + space::NAME + index).to_le_bytes())
                .collect();
            let name_bytes = self.get(at + space::NAME_BYTES) as usize;
            let name = name.get(..name_bytes).ok_or_else(damaged)?;
            let record = SpaceRecord {
                space: SpaceId(self.get(at + space::SPACE)),
                fence: Epoch(self.get(at + space::FENCE)),
                lease_ms: self.get(at + space::LEASE_MS),
                consumer: std::str::from_utf8(name).map_err(|_| damaged())?.to_owned(),
                owner: self.owner(at),
            };
            self.spaces.restore(slot, record.space).ok_or_else(damaged)?;
            records.push(record);
        }
        self.spaces.free_the_rest(used);
        Ok(records)
    }

    fn read_extents(&mut self) -> Result<Vec<LentExtent>, LedgerError> {
        let damaged = || LedgerError::Damaged("extents");
        let used = self.get(header::EXTENTS_USED) as usize;
        if used > self.layout.limits.extents {
            return Err(damaged());
        }
        let mut records = Vec::new();
        for slot in 0..used {
            let at = self.layout.extent(slot);
            let extent = ExtentId(self.get(at + extent::EXTENT));
            if extent.0 == 0 {
                continue;
            }
            let place = self.get(at + extent::PLACE);
            self.extents.restore(slot, extent).ok_or_else(damaged)?;
            records.push(LentExtent {
                extent,
                space: SpaceId(self.get(at + extent::SPACE)),
                segment: self.get(at + extent::SEGMENT),
                member: (place >> 56) as u8,
                order: (place >> 48) as u8,
                first_page: place & ((1 << 48) - 1),
            });
        }
        self.extents.free_the_rest(used);
        Ok(records)
    }

    fn get(&self, at: usize) -> u64 {
        self.words.wide()[at].load(Ordering::Acquire)
    }

    /// Release: no store before this one in the program comes after it in memory.
    fn set(&self, at: usize, value: u64) {
        self.words.wide()[at].store(value, Ordering::Release);
        #[cfg(test)]
        self.stores.borrow_mut().push((at, value));
    }
}

fn clone_failed(source: std::io::Error) -> MemoryError {
    MemoryError::Call { what: "duplicate the descriptor of", bytes: 0, source }
}

/// Which slot holds what.
#[derive(Debug)]
struct Slots<K> {
    by_key: HashMap<K, usize>,
    /// Below `used`; the others are beyond.
    free: Vec<usize>,
    used: usize,
    capacity: usize,
}

impl<K: Hash + Eq> Slots<K> {
    fn new(capacity: usize) -> Slots<K> {
        Slots { by_key: HashMap::new(), free: Vec::new(), used: 0, capacity }
    }

    fn find(&self, key: K) -> Option<usize> {
        self.by_key.get(&key).copied()
    }

    /// The table has the same limits as the ledger, and so asks for no slot that is not there.
    fn take(&mut self, key: K) -> usize {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.used += 1;
            self.used - 1
        });
        assert!(slot < self.capacity, "more records than the table's limits allow");
        self.by_key.insert(key, slot);
        slot
    }

    fn release(&mut self, key: K) -> Option<usize> {
        let slot = self.by_key.remove(&key)?;
        self.free.push(slot);
        Some(slot)
    }

    /// None if the key has a slot already.
    fn restore(&mut self, slot: usize, key: K) -> Option<()> {
        self.by_key.insert(key, slot).is_none().then_some(())
    }

    fn free_the_rest(&mut self, used: usize) {
        let taken: std::collections::HashSet<usize> = self.by_key.values().copied().collect();
        self.used = used;
        self.free = (0..used).rev().filter(|slot| !taken.contains(slot)).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::os::fd::AsFd;

    const ZONES: [Zone; 2] = [Zone { pages: 4096, node: Some(0) }, Zone { pages: 100, node: None }];

    fn ledger() -> Ledger {
        Ledger::create("ledger", Layout::new(4196, 0), &ZONES, 77).unwrap()
    }

    fn reopen(ledger: &Ledger) -> Result<(Ledger, Records), LedgerError> {
        Ledger::adopt(ledger.words.as_fd().try_clone_to_owned().unwrap())
    }

    fn lent(id: u64) -> LentExtent {
        LentExtent {
            extent: ExtentId(id),
            space: SpaceId(id % 3),
            segment: u64::MAX - id,
            member: 255,
            order: (id % 20) as u8,
            first_page: (1 << 48) - id,
        }
    }

    fn record(id: u64) -> SpaceRecord {
        SpaceRecord {
            space: SpaceId(id),
            fence: Epoch(id * 3),
            lease_ms: id + 1000,
            consumer: "ü".repeat(id as usize % 33),
            owner: id.is_multiple_of(2).then(|| NodeDigest::of("a")),
        }
    }

    #[test]
    fn a_successor_finds_what_was_entered() {
        let mut ledger = ledger();
        (0..3).for_each(|id| ledger.put_space(&record(id)));
        (1..9).for_each(|id| ledger.put_extent(&lent(id), Generation(id)));
        ledger.remove_space(SpaceId(1));
        ledger.remove_extent(ExtentId(2));
        ledger.put_space(&SpaceRecord { fence: Epoch(99), ..record(2) });
        let (again, records) = reopen(&ledger).unwrap();
        assert_eq!((again.boot(), again.layout()), (77, ledger.layout()));
        assert_eq!((records.zones, records.next), (ZONES.to_vec(), ExtentId(9)));
        assert_eq!(records.spaces, [record(0), SpaceRecord { fence: Epoch(99), ..record(2) }]);
        let expected: Vec<_> = [1, 3, 4, 5, 6, 7, 8].map(lent).into();
        assert_eq!(records.extents, expected);
    }

    #[test]
    fn a_process_that_knew_no_owners_leaves_none_and_harms_none() {
        let mut ledger = ledger();
        let mut entered = SpaceRecord { owner: None, ..record(4) };
        ledger.put_space(&entered);
        let (mut again, records) = reopen(&ledger).unwrap();
        assert_eq!(records.spaces, [entered.clone()]);
        entered.owner = Some(NodeDigest::of("b"));
        again.put_space(&entered);
        let (again, records) = reopen(&again).unwrap();
        assert_eq!(records.spaces, [entered.clone()]);
        // A changed fence keeps the owner; another space in the slot has none.
        let at = again.layout.space(0);
        again.set(at + space::FENCE, 77);
        let (again, records) = reopen(&again).unwrap();
        entered.fence = Epoch(77);
        assert_eq!(records.spaces, [entered.clone()]);
        again.set(at + space::SPACE, 5);
        let (mut again, records) = reopen(&again).unwrap();
        entered = SpaceRecord { space: SpaceId(5), owner: None, ..entered };
        assert_eq!(records.spaces, [entered.clone()]);
        entered.owner = Some(NodeDigest::of("c"));
        again.put_space(&entered);
        assert_eq!(reopen(&again).unwrap().1.spaces, [entered]);
    }

    #[test]
    fn slots_are_used_again() {
        let mut ledger = ledger();
        for id in 1..100_000 {
            ledger.put_extent(&lent(id), Generation(id));
            ledger.remove_extent(ExtentId(id));
        }
        assert_eq!(ledger.get(header::EXTENTS_USED), 1);
        ledger.put_extent(&lent(100_000), Generation(1));
        ledger.put_extent(&lent(100_001), Generation(1));
        ledger.remove_extent(ExtentId(100_000));
        let (mut again, _) = reopen(&ledger).unwrap();
        again.put_extent(&lent(100_002), Generation(1));
        assert_eq!(again.get(header::EXTENTS_USED), 2);
        assert_eq!(reopen(&again).unwrap().1.extents, [100_002, 100_001].map(lent));
    }

    #[test]
    fn damage_is_seen() {
        type Damage = fn(&Ledger);
        let damages: [(Damage, &str); 8] = [
            (|ledger| ledger.set(header::MAGIC, 1), "no ledger of this version"),
            (|ledger| ledger.set(header::PAGES, 1 << 30), "shared memory"),
            (|ledger| ledger.set(header::PAGES, 0), "size"),
            (|ledger| ledger.set(header::ZONES, 1), "zones"),
            (|ledger| ledger.set(header::SPACES_USED, u64::MAX), "spaces"),
            (|ledger| ledger.set(header::EXTENTS_USED, 1 << 40), "extents"),
            (|ledger| ledger.set(ledger.layout.space(0) + space::NAME_BYTES, 65), "spaces"),
            (|ledger| ledger.set(ledger.layout.space(0) + space::NAME, u64::MAX), "spaces"),
        ];
        for (damage, word) in damages {
            let mut ledger = ledger();
            ledger.put_space(&record(4));
            reopen(&ledger).unwrap();
            damage(&ledger);
            let error = reopen(&ledger).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        PutSpace(u64),
        Fence(u64, u64),
        Own(u64),
        Inherit(u64, u64),
        RemoveSpace(u64),
        PutExtent(u64),
        RemoveExtent(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u64..5).prop_map(Step::PutSpace),
            (0u64..5, any::<u64>()).prop_map(|(id, fence)| Step::Fence(id, fence)),
            (0u64..5).prop_map(Step::Own),
            (0u64..5, any::<u64>()).prop_map(|(id, fence)| Step::Inherit(id, fence)),
            (0u64..5).prop_map(Step::RemoveSpace),
            (0u64..5).prop_map(Step::PutExtent),
            (1u64..40).prop_map(Step::RemoveExtent),
        ]
    }

    type State = (BTreeMap<SpaceId, SpaceRecord>, BTreeMap<ExtentId, LentExtent>);

    fn state(records: Records) -> State {
        (
            records.spaces.into_iter().map(|record| (record.space, record)).collect(),
            records.extents.into_iter().map(|lent| (lent.extent, lent)).collect(),
        )
    }

    /// One space has the owner of after, or none, and its fence of before; all else is as it was.
    fn is_passing(seen: &State, before: &State, after: &State) -> bool {
        let passes = |space: &SpaceRecord| {
            before.0.get(&space.space).is_some_and(|earlier| {
                let later = &after.0[&space.space];
                let owner = space.owner.is_none() || space.owner == later.owner;
                owner && later.owner != earlier.owner && space.fence == earlier.fence
            })
        };
        let is_same = |space: &&SpaceRecord| before.0.get(&space.space) == Some(space);
        let mut others = seen.0.values().filter(|space| !is_same(space));
        let one = others.next().is_some_and(passes) && others.next().is_none();
        one && seen.0.len() == before.0.len() && seen.1 == before.1
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// A process killed after any store leaves the records of before or after the change that
        /// it was making.
        #[test]
        fn every_prefix_of_the_stores_is_whole(steps in prop::collection::vec(step(), 1..16)) {
            let mut ledger = ledger();
            let (mut model, mut next) = (State::default(), 1);
            // The number of stores after each step, and the records at that moment.
            let mut done = vec![(ledger.stores.borrow().len(), model.clone())];
            for step in steps {
                match step {
                    Step::PutSpace(id) => {
                        model.0.entry(SpaceId(id)).or_insert_with(|| record(id));
                        ledger.put_space(&model.0[&SpaceId(id)]);
                    }
                    Step::Fence(id, fence) => {
                        if let Some(record) = model.0.get_mut(&SpaceId(id)) {
                            record.fence = Epoch(fence);
                            ledger.put_space(record);
                        }
                    }
                    Step::Own(id) => {
                        if let Some(record) = model.0.get_mut(&SpaceId(id)) {
                            record.owner.get_or_insert(NodeDigest::of("b"));
                            ledger.put_space(record);
                        }
                    }
                    Step::Inherit(id, fence) => {
                        if let Some(record) = model.0.get_mut(&SpaceId(id)) {
                            let heirs = ["b", "c"].map(NodeDigest::of);
                            record.owner = heirs.into_iter().find(|heir| record.owner != Some(*heir));
                            record.fence = Epoch(fence);
                            ledger.put_space(record);
                        }
                    }
                    Step::RemoveSpace(id) => {
                        model.0.remove(&SpaceId(id));
                        ledger.remove_space(SpaceId(id));
                    }
                    Step::PutExtent(space) => {
                        let lent = LentExtent { space: SpaceId(space), ..lent(next) };
                        next += 1;
                        model.1.insert(lent.extent, lent);
                        ledger.put_extent(&lent, Generation(1));
                    }
                    Step::RemoveExtent(id) => {
                        model.1.remove(&ExtentId(id));
                        ledger.remove_extent(ExtentId(id));
                    }
                }
                done.push((ledger.stores.borrow().len(), model.clone()));
            }
            let stores = ledger.stores.borrow();
            let killed = Ledger::create("killed", ledger.layout, &[], 0).unwrap();
            let mut written = 0;
            for pair in done.windows(2) {
                for cut in pair[0].0..=pair[1].0 {
                    for &(at, value) in &stores[written..cut] {
                        killed.words.wide()[at].store(value, Ordering::Relaxed);
                    }
                    written = cut;
                    let (_, records) = reopen(&killed).unwrap();
                    let next = records.next;
                    let seen = state(records);
                    let is_either = seen == pair[0].1 || seen == pair[1].1;
                    prop_assert!(is_either || is_passing(&seen, &pair[0].1, &pair[1].1), "{:?}", seen);
                    prop_assert!(seen.1.keys().all(|&id| id < next));
                }
            }
        }
    }
}
