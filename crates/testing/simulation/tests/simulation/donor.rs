//! A donor in the simulation: the donor's own table, with a map of values where its memory is.

use crate::borrower::SEGMENT_ORDER;
use crate::dice::Dice;
use crate::memory::{Memory, Moved};
use crate::network::{
    Answered, Asked, ConnId, DECAYED, Network, Stored, ToBorrower, ToDonor, Value, sum_of,
};
use hecaton_donor::extents::standing::{after_confirm, after_write};
use hecaton_donor::extents::table::{Allocated, LentExtent, Table, TableLimits, Zone};
use hecaton_memory::{Epoch, ExtentId, Generation, SpaceId};
use hecaton_policy::parking::{self, Move};
use hecaton_policy::pressure::{Pressure, Seen};
use hecaton_transport::protocol::{Load, MAX_HELD, PageState, Refusal};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(crate) const LEASE_MS: u64 = 4_000;

/// For the bounds of the decision about a host's memory, which are made for larger pages and for
/// hosts that are slower to change: how many bytes a page counts as, and how much faster time
/// passes.
const PRESSURE_BYTES: u64 = 64 << 20;
const PRESSURE_HASTE: u64 = 60;

/// Pages that a donor keeps available on its host.
const KEEP_FREE_PAGES: u64 = 10;

/// For how long borrowers must have given nothing before something is parked.
const PARK_AFTER_MS: u64 = 300;

/// Space and epoch of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Who {
    pub(crate) space: SpaceId,
    pub(crate) epoch: Epoch,
}

struct Session {
    who: Who,
    lane: u64,
}

pub(crate) struct Donor {
    pub(crate) table: Table,
    pub(crate) boot: u64,
    pub(crate) draining: bool,
    /// Pages that its host has for it and for others.
    pub(crate) host_pages: u64,
    /// Most pages that it was told to lend.
    told_pages: u64,
    pressure: Pressure,
    pages: u64,
    generations: BTreeMap<ExtentId, Generation>,
    /// Pages discarded from extents that are being filled.
    discarded: BTreeSet<(ExtentId, u32)>,
    memory: Memory,
    /// Pages that its disk takes, if it parks.
    pub(crate) disk_pages: u64,
    /// When an extent was last read or written, for those that were.
    touched_ms: BTreeMap<ExtentId, u64>,
    pub(crate) parked: u64,
    pub(crate) fetched: u64,
    sessions: BTreeMap<ConnId, Session>,
    /// The oldest epochs that may be served, as it was told in this life.
    fences: BTreeMap<SpaceId, Epoch>,
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
            memory: Memory::default(),
            disk_pages: 0,
            touched_ms: BTreeMap::new(),
            parked: 0,
            fetched: 0,
            sessions: BTreeMap::new(),
            fences: BTreeMap::new(),
            leaving: Vec::new(),
        }
    }

    /// Dies, and comes back with nothing.
    pub(crate) fn restart(&mut self, boot: u64, now_ms: u64) {
        let Donor { host_pages, told_pages, disk_pages, parked, fetched, .. } = *self;
        let next = Donor::new(self.pages, boot);
        *self = Donor { host_pages, told_pages, disk_pages, parked, fetched, ..next };
        self.look_at_host(now_ms);
    }

    /// Is told to lend no more than that.
    pub(crate) fn set_limit(&mut self, pages: u64, now_ms: u64) {
        self.told_pages = pages;
        self.look_at_host(now_ms);
    }

    /// As the donor does now and then.
    pub(crate) fn look_at_host(&mut self, now_ms: u64) {
        let in_memory = self.memory.in_memory(0..self.pages);
        let available = self.host_pages.saturating_sub(in_memory);
        let in_use = self.memory_pages();
        let seen = Seen {
            available_bytes: available.saturating_mul(PRESSURE_BYTES),
            in_use_bytes: in_use * PRESSURE_BYTES,
        };
        let now = Duration::from_millis(now_ms * PRESSURE_HASTE);
        let of_host = self.pressure.limit(seen, now) / PRESSURE_BYTES;
        self.table.set_limit(self.told_pages.min(of_host), now_ms);
    }

    /// Pages of extents that take memory, with those of parked ones that were written since.
    pub(crate) fn memory_pages(&self) -> u64 {
        let parked = self.table.extents().filter(|lent| self.table.is_parked(lent.extent));
        let strays: u64 = parked.map(|lent| self.memory.in_memory(lent.pages())).sum();
        self.table.memory_pages() + strays
    }

    /// Moves an extent between memory and the disk, as the donor's keeper does.
    fn keep(&mut self, now_ms: u64) {
        let room = self.disk_pages.saturating_sub(self.memory.file_pages());
        let is_there = |extent| self.table.extents().any(|lent| lent.extent == extent);
        if let Some(Moved { lent, to_file }) = self.memory.end(now_ms, room, is_there) {
            self.table.set_parked(&lent, to_file);
            *(if to_file { &mut self.parked } else { &mut self.fetched }) += 1;
        }
        let is_idle = self.table.excess_pages() == 0 && self.table.parked_pages() == 0;
        if is_idle || self.memory.is_moving() {
            return;
        }
        let is_whole = |lent: &&LentExtent| self.generations[&lent.extent] != Generation::FILLING;
        let lent: Vec<LentExtent> = self.table.extents().filter(is_whole).copied().collect();
        let extents = lent.iter().map(|lent| parking::Extent {
            pages: lent.count(),
            is_parked: self.table.is_parked(lent.extent),
            touched_ms: self.touched_ms.get(&lent.extent).copied().unwrap_or_default(),
        });
        let seen = parking::Seen {
            limit_pages: self.table.limit_pages(),
            memory_pages: self.memory_pages(),
            stalled_ms: self.table.stalled_ms(now_ms),
            patience_ms: PARK_AFTER_MS,
            file_room_pages: room,
        };
        let is_astray = |lent: &&LentExtent| {
            self.table.is_parked(lent.extent) && self.memory.in_memory(lent.pages()) > 0
        };
        match (parking::next(seen, &extents.collect::<Vec<_>>()), lent.iter().find(is_astray)) {
            (Some(Move::Fetch(at)), _) => self.memory.begin(lent[at], false, now_ms),
            (_, Some(astray)) => self.memory.begin(*astray, true, now_ms),
            (Some(Move::Park(at)), None) => self.memory.begin(lent[at], true, now_ms),
            (None, None) => {}
        }
    }

    /// Most pages that it was told to lend.
    pub(crate) fn told_pages(&self) -> u64 {
        self.told_pages
    }

    /// Pages that it has, lent or not.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    pub(crate) fn is_all_free(&self) -> bool {
        self.table.free_pages() == self.pages && self.memory.is_empty()
    }

    /// Whether it has an extent of the segment that has missed nothing since that generation.
    pub(crate) fn has(&self, (space, segment): (SpaceId, u64), since: Generation) -> bool {
        self.table.extents().any(|lent| {
            let generation = self.generations[&lent.extent];
            (lent.space, lent.segment) == (space, segment)
                && generation != Generation::FILLING
                && generation >= since
        })
    }

    pub(crate) fn has_extent(&self, extent: ExtentId) -> bool {
        self.table.extents().any(|lent| lent.extent == extent)
    }

    fn pages_written(&self, lent: &LentExtent) -> u32 {
        self.memory.written(lent.pages())
    }

    /// Gives back what was freed some time ago.
    pub(crate) fn reclaim(&mut self) {
        for lent in std::mem::take(&mut self.leaving) {
            for page in lent.pages() {
                self.memory.remove(page);
            }
            self.table.reclaimed(lent.extent);
        }
        self.table.assert_consistent();
    }

    /// Takes the extents whose lease has run out. Says of which segments.
    pub(crate) fn expire(&mut self, now_ms: u64) -> Vec<(SpaceId, u64)> {
        self.look_at_host(now_ms);
        self.table.review(now_ms);
        self.keep(now_ms);
        let mut segments = Vec::new();
        for space in self.table.due(now_ms) {
            let taken = self.table.expire(space, now_ms);
            segments.extend(taken.iter().map(|lent| (lent.space, lent.segment)));
            self.leaving.extend(taken);
        }
        segments
    }

    pub(crate) fn ended(&mut self, conn: ConnId) {
        if let Some(session) = self.sessions.remove(&conn) {
            self.table.bye(session.who.space);
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
            ToDonor::Hello { space, epoch, lane } => {
                let earlier = self.sessions.iter().find(|(_, session)| session.lane == lane);
                if let Some(earlier) = earlier.map(|(conn, _)| *conn) {
                    self.ended(earlier);
                    net.sever(earlier, dice);
                }
                let now_ms = net.now.as_millis() as u64;
                let welcome = self.table.hello(space, epoch, LEASE_MS, "simulated", now_ms);
                let welcome = welcome.map(|()| {
                    self.sessions.insert(conn, Session { who: Who { space, epoch }, lane });
                    (self.boot, self.load(space))
                });
                net.send_to_borrower(conn, ToBorrower::Welcome(welcome), dice);
            }
            ToDonor::Request { id, asked, data } => {
                let Some(who) = self.who(conn) else { return };
                let now_ms = net.now.as_millis() as u64;
                let (answered, data) = match self.handle(who, &asked, &data, now_ms) {
                    Ok(answer) => {
                        let fence = self.fences.get(&who.space).copied().unwrap_or(Epoch(0));
                        assert!(who.epoch >= fence, "{who:?} is served behind {fence:?}");
                        answer
                    }
                    Err(refusal) => (Answered::Refused(refusal), Vec::new()),
                };
                let load = self.load(who.space);
                net.send_to_borrower(conn, ToBorrower::Answer { id, answered, load, data }, dice);
            }
        }
    }

    /// Space and epoch of a connection, if it is open.
    pub(crate) fn who(&self, conn: ConnId) -> Option<Who> {
        self.sessions.get(&conn).map(|session| session.who)
    }

    /// Pages for another donor that fills an extent from one here.
    pub(crate) fn pages_for(
        &mut self,
        who: Who,
        boot: u64,
        extent: ExtentId,
        pages: std::ops::Range<u32>,
        now_ms: u64,
    ) -> Result<Vec<Stored>, Refusal> {
        if boot != self.boot {
            return Err(Refusal::NoSource);
        }
        let located = self.table.locate(who.space, who.epoch, extent, now_ms);
        let lent = located.map_err(|_| Refusal::NoSource)?;
        let stored = |page| Ok(self.memory.get(lent.page(page)?).copied().unwrap_or_default());
        pages.map(stored).collect()
    }

    /// Stores what was read from another donor, as the lender does.
    pub(crate) fn fill(
        &mut self,
        who: Who,
        extent: ExtentId,
        first: u32,
        pages: &[Stored],
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let lent = self.table.locate(who.space, who.epoch, extent, now_ms)?;
        if self.generations[&extent] != Generation::FILLING {
            return Err(Refusal::NotFilling);
        }
        for (page, stored) in (first..).zip(pages) {
            let at = lent.page(page)?;
            let is_newer =
                self.memory.get(at).is_some() || self.discarded.contains(&(extent, page));
            if !is_newer && *stored != Stored::default() {
                self.memory.insert(at, *stored);
            }
        }
        Ok(())
    }

    /// The state of a run of pages.
    pub(crate) fn verify(
        &mut self,
        who: Who,
        extent: ExtentId,
        (first, count): (u32, u32),
        now_ms: u64,
    ) -> Result<Vec<PageState>, Refusal> {
        let run = self.table.locate(who.space, who.epoch, extent, now_ms)?.run(first, count)?;
        let state = |page: u64| match self.memory.get(page) {
            None => PageState::Unwritten,
            Some(stored) if stored.is_sound() => PageState::Sound(stored.sum),
            Some(stored) => PageState::Damaged(stored.sum),
        };
        Ok(run.map(state).collect())
    }

    /// Stores what was read from another donor for pages that are damaged, as the lender does.
    pub(crate) fn mend(
        &mut self,
        who: Who,
        extent: ExtentId,
        pages: &[(u32, Stored)],
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let lent = self.table.locate(who.space, who.epoch, extent, now_ms)?;
        for (page, other) in pages {
            let at = lent.page(*page)?;
            let Some(&here) = self.memory.get(at) else { continue };
            if !here.is_sound() && sum_of(other.value) == here.sum {
                self.memory.insert(at, Stored { value: other.value, ..here });
            }
        }
        Ok(())
    }

    /// A page of an extent goes bad, if it was written and is not bad yet; with its sum, if
    /// `wholly`.
    pub(crate) fn decay(&mut self, extent: ExtentId, page: u32, wholly: bool) -> bool {
        let here = self.page_of(extent, page).and_then(|at| self.memory.get_mut(at));
        let Some(here) = here.filter(|here| here.value & DECAYED == 0) else { return false };
        here.value = DECAYED | (here.value ^ 1);
        if wholly {
            here.sum = sum_of(here.value);
        }
        true
    }

    /// Contents and sum of a page of an extent.
    pub(crate) fn stored(&self, extent: ExtentId, page: u32) -> Stored {
        let at = self.page_of(extent, page);
        at.and_then(|at| self.memory.get(at)).copied().unwrap_or_default()
    }

    /// Where a page of an extent is in its memory.
    fn page_of(&self, extent: ExtentId, page: u32) -> Option<u64> {
        let lent = self.table.extents().find(|lent| lent.extent == extent)?;
        lent.page(page).ok()
    }

    pub(crate) fn load(&self, space: SpaceId) -> Load {
        let free_pages = if self.draining { 0 } else { self.table.lendable_pages() };
        let recalled = self.table.recalled(space) as u32;
        Load { free_pages, in_service: 0, draining: self.draining, recalled }
    }

    fn handle(
        &mut self,
        who: Who,
        asked: &Asked,
        data: &[Value],
        now_ms: u64,
    ) -> Result<(Answered, Vec<Value>), Refusal> {
        let table = &mut self.table;
        let answered = match asked {
            Asked::Read { extent, pages } => {
                let lent = table.locate(who.space, who.epoch, *extent, now_ms)?;
                self.touched_ms.insert(*extent, now_ms);
                let stored = |page: &u32| {
                    let stored: Stored =
                        self.memory.get(lent.page(*page)?).copied().unwrap_or_default();
                    Ok((stored.sum, stored.value))
                };
                let (sums, values) = pages
                    .iter()
                    .map(stored)
                    .collect::<Result<(Vec<u32>, Vec<Value>), Refusal>>()?;
                return Ok((Answered::Pages(sums), values));
            }
            Asked::Write { extent, generation, pages, sums } => {
                let lent = table.locate(who.space, who.epoch, *extent, now_ms)?;
                if let Some(at) = data.iter().zip(sums).position(|(v, sum)| sum_of(*v) != *sum) {
                    return Err(Refusal::Corrupt(at as u32));
                }
                let known = self.generations.get_mut(extent).expect("of every extent");
                *known = after_write(*known, *generation);
                for ((page, value), sum) in pages.iter().zip(data).zip(sums) {
                    self.memory.insert(lent.page(*page)?, Stored { value: *value, sum: *sum });
                }
                Answered::Done
            }
            Asked::Discard { extent, generation, first, count } => {
                let lent = table.locate(who.space, who.epoch, *extent, now_ms)?;
                let known = self.generations.get_mut(extent).expect("of every extent");
                *known = after_write(*known, *generation);
                for page in lent.run(*first, *count)? {
                    self.memory.remove(page);
                }
                if self.generations[extent] == Generation::FILLING {
                    self.discarded.extend((*first..first + count).map(|page| (*extent, page)));
                }
                Answered::Done
            }
            Asked::Confirm { extent, generation } => {
                table.locate(who.space, who.epoch, *extent, now_ms)?;
                let known = self.generations.get_mut(extent).expect("of every extent");
                *known = after_confirm(*known, *generation);
                Answered::Done
            }
            Asked::Verify { extent, first, count } => {
                Answered::Verified(self.verify(who, *extent, (*first, *count), now_ms)?)
            }
            Asked::Fill { .. } | Asked::Repair { .. } => {
                unreachable!("the world does it, since it takes two donors")
            }
            Asked::Allocate { segment, order, generation } => {
                match table.allocate(who.space, who.epoch, (*segment, 0), *order, now_ms)? {
                    Allocated::Held(lent) => Answered::Allocated(lent.extent),
                    Allocated::Fresh(lent) if self.draining => {
                        self.leaving.push(table.free(who.space, who.epoch, lent.extent, now_ms)?);
                        return Err(Refusal::Full);
                    }
                    Allocated::Fresh(lent) => {
                        self.generations.insert(lent.extent, *generation);
                        let leftover = self.memory.written(lent.pages());
                        assert_eq!(leftover, 0, "a fresh extent with contents");
                        Answered::Allocated(lent.extent)
                    }
                }
            }
            Asked::Free { extent } => {
                self.leaving.push(table.free(who.space, who.epoch, *extent, now_ms)?);
                Answered::Done
            }
            Asked::FreeAll => {
                self.leaving.extend(table.free_all(who.space, who.epoch, now_ms)?);
                Answered::Done
            }
            Asked::List { from } => {
                let listed: Vec<_> =
                    table.list(who.space, who.epoch, *from, MAX_HELD, now_ms)?.collect();
                let line = |lent: &LentExtent| {
                    lent.line(self.pages_written(lent), self.generations[&lent.extent])
                };
                Answered::Held(listed.iter().map(line).collect())
            }
            Asked::Fence => {
                table.fence(who.space, who.epoch, now_ms)?;
                self.fences.insert(who.space, who.epoch);
                Answered::Done
            }
            Asked::Renew => table.renew(who.space, who.epoch, now_ms).map(|()| Answered::Done)?,
        };
        Ok((answered, Vec::new()))
    }
}
