//! A donor in the simulation: the donor's own table, with a map of values where its memory is.

use crate::borrower::SEGMENT_ORDER;
use crate::dice::Dice;
use crate::network::{
    Answered, Asked, ConnId, DECAYED, Network, Stored, ToBorrower, ToDonor, Value, sum_of,
};
use hecaton_donor::standing::{after_confirm, after_write};
use hecaton_donor::table::{Allocated, LentExtent, Table, TableLimits, Zone};
use hecaton_memory::{Epoch, ExtentId, Generation, SpaceId};
use hecaton_policy::pressure::{Pressure, Seen};
use hecaton_transport::protocol::{Load, MAX_HELD, PageState, Refusal};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(crate) const SPACE: SpaceId = SpaceId(77);
pub(crate) const LEASE_MS: u64 = 4_000;

/// For the bounds of the decision about a host's memory, which are made for larger pages and for hosts
/// that are slower to change: how many bytes a page counts as, and how much faster time passes.
const PRESSURE_BYTES: u64 = 64 << 20;
const PRESSURE_HASTE: u64 = 60;

/// Pages that a donor keeps available on its host.
const KEEP_FREE_PAGES: u64 = 10;

struct Session {
    epoch: Epoch,
    lane: u64,
}

pub(crate) struct Donor {
    pub(crate) table: Table,
    pub(crate) boot: u64,
    pub(crate) draining: bool,
    /// Pages that its host has for it and for others.
    pub(crate) host_pages: u64,
    /// What it was told to lend at most.
    told_pages: u64,
    pressure: Pressure,
    pages: u64,
    generations: BTreeMap<ExtentId, Generation>,
    /// Pages discarded from extents that are being filled.
    discarded: BTreeSet<(ExtentId, u32)>,
    /// By page of the donor's memory. What is not there is zero.
    memory: BTreeMap<u64, Stored>,
    sessions: BTreeMap<ConnId, Session>,
    /// Extents whose memory the host is still to get back.
    leaving: Vec<LentExtent>,
}

fn table_of(pages: u64) -> Table {
    let limits = TableLimits { extents: 1000, spaces: 10, min_order: SEGMENT_ORDER };
    Table::new(&[Zone { pages, node: None }], limits)
}

impl Donor {
    pub(crate) fn new(pages: u64, boot: u64) -> Donor {
        Donor {
            table: table_of(pages),
            boot,
            draining: false,
            host_pages: u64::MAX,
            told_pages: pages,
            pressure: Pressure::new(pages * PRESSURE_BYTES, KEEP_FREE_PAGES * PRESSURE_BYTES),
            pages,
            generations: BTreeMap::new(),
            discarded: BTreeSet::new(),
            memory: BTreeMap::new(),
            sessions: BTreeMap::new(),
            leaving: Vec::new(),
        }
    }

    /// Dies, and comes back with nothing.
    pub(crate) fn restart(&mut self, boot: u64, now_ms: u64) {
        let Donor { host_pages, told_pages, .. } = *self;
        *self = Donor { host_pages, told_pages, ..Donor::new(self.pages, boot) };
        self.look_at_host(now_ms);
    }

    /// Is told to lend no more than that.
    pub(crate) fn set_limit(&mut self, pages: u64, now_ms: u64) {
        self.told_pages = pages;
        self.look_at_host(now_ms);
    }

    /// As the donor does now and then.
    pub(crate) fn look_at_host(&mut self, now_ms: u64) {
        let available = self.host_pages.saturating_sub(self.memory.len() as u64);
        let in_use = self.table.lent_pages() + self.table.leaving_pages();
        let seen = Seen {
            available_bytes: available.saturating_mul(PRESSURE_BYTES),
            in_use_bytes: in_use * PRESSURE_BYTES,
        };
        let now = Duration::from_millis(now_ms * PRESSURE_HASTE);
        let of_host = self.pressure.limit(seen, now) / PRESSURE_BYTES;
        self.table.set_limit(self.told_pages.min(of_host), now_ms);
    }

    /// Pages that it has, lent or not.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    pub(crate) fn is_all_free(&self) -> bool {
        self.table.free_pages() == self.pages && self.memory.is_empty()
    }

    /// Whether it has an extent of the segment that has missed nothing since that generation.
    pub(crate) fn has(&self, segment: u64, since: Generation) -> bool {
        self.table.extents().any(|lent| {
            let generation = self.generations[&lent.extent];
            lent.segment == segment && generation != Generation::FILLING && generation >= since
        })
    }

    pub(crate) fn has_extent(&self, extent: ExtentId) -> bool {
        self.table.extents().any(|lent| lent.extent == extent)
    }

    fn pages_written(&self, lent: &LentExtent) -> u32 {
        self.memory.range(lent.pages()).count() as u32
    }

    /// Gives back what was freed some time ago.
    pub(crate) fn reclaim(&mut self) {
        for lent in std::mem::take(&mut self.leaving) {
            for page in lent.pages() {
                self.memory.remove(&page);
            }
            self.table.reclaimed(lent.extent);
        }
        self.table.assert_consistent();
    }

    /// Takes the extents whose lease has run out. Says of which segments.
    pub(crate) fn expire(&mut self, now_ms: u64) -> Vec<u64> {
        self.look_at_host(now_ms);
        self.table.review(now_ms);
        let mut segments = Vec::new();
        for space in self.table.due(now_ms) {
            let taken = self.table.expire(space, now_ms);
            segments.extend(taken.iter().map(|lent| lent.segment));
            self.leaving.extend(taken);
        }
        segments
    }

    pub(crate) fn ended(&mut self, conn: ConnId) {
        if self.sessions.remove(&conn).is_some() {
            self.table.bye(SPACE);
        }
    }

    pub(crate) fn receive(
        &mut self,
        conn: ConnId,
        message: ToDonor,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        match message {
            ToDonor::Hello { .. } if self.sessions.contains_key(&conn) => {
                // A frame that cannot be: the connection is closed.
                self.ended(conn);
                net.sever(conn, dice);
            }
            ToDonor::Hello { epoch, lane } => {
                let earlier = self.sessions.iter().find(|(_, session)| session.lane == lane);
                if let Some(earlier) = earlier.map(|(conn, _)| *conn) {
                    self.ended(earlier);
                    net.sever(earlier, dice);
                }
                let now_ms = net.now.as_millis() as u64;
                let welcome = self.table.hello(SPACE, epoch, LEASE_MS, "simulated", now_ms);
                let welcome = welcome.map(|()| {
                    self.sessions.insert(conn, Session { epoch, lane });
                    (self.boot, self.load())
                });
                net.send_to_borrower(conn, ToBorrower::Welcome(welcome), dice);
            }
            ToDonor::Request { id, asked, data } => {
                let Some(epoch) = self.epoch_of(conn) else { return };
                let now_ms = net.now.as_millis() as u64;
                let (answered, data) = match self.handle(epoch, &asked, &data, now_ms) {
                    Ok(answer) => answer,
                    Err(refusal) => (Answered::Refused(refusal), Vec::new()),
                };
                let load = self.load();
                net.send_to_borrower(conn, ToBorrower::Answer { id, answered, load, data }, dice);
            }
        }
    }

    /// The epoch of a connection that is open.
    pub(crate) fn epoch_of(&self, conn: ConnId) -> Option<Epoch> {
        self.sessions.get(&conn).map(|session| session.epoch)
    }

    /// What another donor is sent that fills an extent from one here.
    pub(crate) fn pages_for(
        &mut self,
        epoch: Epoch,
        boot: u64,
        extent: ExtentId,
        pages: std::ops::Range<u32>,
        now_ms: u64,
    ) -> Result<Vec<Stored>, Refusal> {
        if boot != self.boot {
            return Err(Refusal::NoSource);
        }
        let located = self.table.locate(SPACE, epoch, extent, now_ms);
        let lent = located.map_err(|_| Refusal::NoSource)?;
        let stored = |page| Ok(self.memory.get(&lent.page(page)?).copied().unwrap_or_default());
        pages.map(stored).collect()
    }

    /// Stores what was read from another donor, as the lender does.
    pub(crate) fn fill(
        &mut self,
        epoch: Epoch,
        extent: ExtentId,
        first: u32,
        pages: &[Stored],
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let lent = self.table.locate(SPACE, epoch, extent, now_ms)?;
        if self.generations[&extent] != Generation::FILLING {
            return Err(Refusal::NotFilling);
        }
        for (page, stored) in (first..).zip(pages) {
            let at = lent.page(page)?;
            let is_newer =
                self.memory.contains_key(&at) || self.discarded.contains(&(extent, page));
            if !is_newer && *stored != Stored::default() {
                self.memory.insert(at, *stored);
            }
        }
        Ok(())
    }

    /// The state of a run of pages.
    pub(crate) fn verify(
        &mut self,
        epoch: Epoch,
        extent: ExtentId,
        (first, count): (u32, u32),
        now_ms: u64,
    ) -> Result<Vec<PageState>, Refusal> {
        let run = self.table.locate(SPACE, epoch, extent, now_ms)?.run(first, count)?;
        let state = |page: u64| match self.memory.get(&page) {
            None => PageState::Unwritten,
            Some(stored) if stored.is_sound() => PageState::Sound(stored.sum),
            Some(stored) => PageState::Damaged(stored.sum),
        };
        Ok(run.map(state).collect())
    }

    /// Stores what was read from another donor for pages that are damaged, as the lender does.
    pub(crate) fn mend(
        &mut self,
        epoch: Epoch,
        extent: ExtentId,
        pages: &[(u32, Stored)],
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let lent = self.table.locate(SPACE, epoch, extent, now_ms)?;
        for (page, other) in pages {
            let Some(here) = self.memory.get_mut(&lent.page(*page)?) else { continue };
            if !here.is_sound() && sum_of(other.value) == here.sum {
                here.value = other.value;
            }
        }
        Ok(())
    }

    /// A page of an extent goes bad, if it was written and is not bad yet; with its sum, if `wholly`.
    pub(crate) fn decay(&mut self, extent: ExtentId, page: u32, wholly: bool) -> bool {
        let here = self.stored_mut(extent, page).filter(|here| here.value & DECAYED == 0);
        let Some(here) = here else { return false };
        here.value = DECAYED | (here.value ^ 1);
        if wholly {
            here.sum = sum_of(here.value);
        }
        true
    }

    /// What a page of an extent holds.
    pub(crate) fn stored(&mut self, extent: ExtentId, page: u32) -> Stored {
        self.stored_mut(extent, page).copied().unwrap_or_default()
    }

    fn stored_mut(&mut self, extent: ExtentId, page: u32) -> Option<&mut Stored> {
        let lent = self.table.extents().find(|lent| lent.extent == extent)?;
        let at = lent.page(page).ok()?;
        self.memory.get_mut(&at)
    }

    pub(crate) fn load(&self) -> Load {
        let free_pages = if self.draining { 0 } else { self.table.lendable_pages() };
        let recalled = self.table.recalled(SPACE) as u32;
        Load { free_pages, in_service: 0, draining: self.draining, recalled }
    }

    fn handle(
        &mut self,
        epoch: Epoch,
        asked: &Asked,
        data: &[Value],
        now_ms: u64,
    ) -> Result<(Answered, Vec<Value>), Refusal> {
        let table = &mut self.table;
        let answered = match asked {
            Asked::Read { extent, pages } => {
                let lent = table.locate(SPACE, epoch, *extent, now_ms)?;
                let stored = |page: &u32| {
                    let stored: Stored =
                        self.memory.get(&lent.page(*page)?).copied().unwrap_or_default();
                    Ok((stored.sum, stored.value))
                };
                let (sums, values) = pages
                    .iter()
                    .map(stored)
                    .collect::<Result<(Vec<u32>, Vec<Value>), Refusal>>()?;
                return Ok((Answered::Pages(sums), values));
            }
            Asked::Write { extent, generation, pages, sums } => {
                let lent = table.locate(SPACE, epoch, *extent, now_ms)?;
                let known = self.generations.get_mut(extent).expect("of every extent");
                *known = after_write(*known, *generation);
                for ((page, value), sum) in pages.iter().zip(data).zip(sums) {
                    assert_eq!(sum_of(*value), *sum);
                    self.memory.insert(lent.page(*page)?, Stored { value: *value, sum: *sum });
                }
                Answered::Done
            }
            Asked::Discard { extent, generation, first, count } => {
                let lent = table.locate(SPACE, epoch, *extent, now_ms)?;
                let known = self.generations.get_mut(extent).expect("of every extent");
                *known = after_write(*known, *generation);
                for page in lent.run(*first, *count)? {
                    self.memory.remove(&page);
                }
                if self.generations[extent] == Generation::FILLING {
                    self.discarded.extend((*first..first + count).map(|page| (*extent, page)));
                }
                Answered::Done
            }
            Asked::Confirm { extent, generation } => {
                table.locate(SPACE, epoch, *extent, now_ms)?;
                let known = self.generations.get_mut(extent).expect("of every extent");
                *known = after_confirm(*known, *generation);
                Answered::Done
            }
            Asked::Verify { extent, first, count } => {
                Answered::Verified(self.verify(epoch, *extent, (*first, *count), now_ms)?)
            }
            Asked::Fill { .. } | Asked::Repair { .. } => {
                unreachable!("the world does it, since it takes two donors")
            }
            Asked::Allocate { segment, order, generation } => {
                match table.allocate(SPACE, epoch, (*segment, 0), *order, now_ms)? {
                    Allocated::Held(lent) => Answered::Allocated(lent.extent),
                    Allocated::Fresh(lent) if self.draining => {
                        self.leaving.push(table.free(SPACE, epoch, lent.extent, now_ms)?);
                        return Err(Refusal::Full);
                    }
                    Allocated::Fresh(lent) => {
                        self.generations.insert(lent.extent, *generation);
                        let leftover = self.memory.range(lent.pages()).next();
                        assert_eq!(leftover, None, "a fresh extent with contents");
                        Answered::Allocated(lent.extent)
                    }
                }
            }
            Asked::Free { extent } => {
                self.leaving.push(table.free(SPACE, epoch, *extent, now_ms)?);
                Answered::Done
            }
            Asked::FreeAll => {
                self.leaving.extend(table.free_all(SPACE, epoch, now_ms)?);
                Answered::Done
            }
            Asked::List { from } => {
                let listed: Vec<_> = table.list(SPACE, epoch, *from, MAX_HELD, now_ms)?.collect();
                let line = |lent: &LentExtent| {
                    lent.line(self.pages_written(lent), self.generations[&lent.extent])
                };
                Answered::Held(listed.iter().map(line).collect())
            }
            Asked::Fence => table.fence(SPACE, epoch, now_ms).map(|()| Answered::Done)?,
            Asked::Renew => table.renew(SPACE, epoch, now_ms).map(|()| Answered::Done)?,
        };
        Ok((answered, Vec::new()))
    }
}
