//! One space, and what is known of it from outside: its owner and those that the owner has
//! replaced, what they were asked for, and what each page may be read as.

use crate::borrower::{Borrower, Job, SEGMENT_PAGES, SEGMENTS, Scrubbed, Told, Why};
use crate::dice::Dice;
use crate::network::{DECAYED, Host, Value, sum_of};
use crate::oracle::Oracle;
use crate::pool::Pool;
use hecaton_memory::{Epoch, Generation, SpaceId};
use hecaton_space::Coded;
use hecaton_space::code::Code;
use hecaton_space::group::{DonorIndex, Group};
use hecaton_space::lookup::Whereabouts;
use std::collections::{BTreeMap, BTreeSet};

const LANES: usize = 3;

/// How a space holds its segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) copies: u8,
    pub(crate) code: Option<Code>,
}

/// Request of the workload that is in flight.
#[derive(Clone, Debug)]
pub(crate) enum Pending {
    Read { key: u64, segment: u64, pages: Vec<u32>, avoid: Vec<DonorIndex> },
    Write { segment: u64, pages: Vec<u32>, values: Vec<Value> },
    Free { segment: u64 },
    Discard { segment: u64, first: u32, count: u32 },
    FreeAll,
}

impl Pending {
    pub(crate) fn segment(&self) -> Option<u64> {
        match self {
            Pending::Read { segment, .. }
            | Pending::Write { segment, .. }
            | Pending::Free { segment }
            | Pending::Discard { segment, .. } => Some(*segment),
            Pending::FreeAll => None,
        }
    }
}

pub(crate) struct Tenant {
    pub(crate) space: SpaceId,
    /// Where its owner runs.
    pub(crate) host: Host,
    /// The last one is the owner; those before it were replaced and do not all know it yet.
    pub(crate) borrowers: Vec<Borrower>,
    pub(crate) oracle: Oracle,
    pub(crate) pending: BTreeMap<u64, Pending>,
    next_token: u64,
    epoch: u64,
    pub(crate) copies: u8,
    pub(crate) code: Option<Code>,
    /// The owner's record of coded stripes.
    pub(crate) recorded: BTreeMap<u64, Coded>,
    /// Whether pages go bad where they are stored.
    pub(crate) decays: bool,
    /// Segments with pages that have gone bad with their sums.
    pub(crate) wholly_decayed: BTreeSet<u64>,
    /// Pages that came damaged, and are to be read again from others.
    pub(crate) to_read_again: Vec<(u64, u32, Vec<DonorIndex>)>,
    /// Nothing goes wrong any more, and all is read.
    pub(crate) is_reading_all: bool,
    /// The owner was told everything and nobody else can write any more.
    pub(crate) settled: bool,
}

impl Tenant {
    /// A space that is new, of an owner who knows these donors.
    pub(crate) fn new(
        (space, host): (SpaceId, Host),
        kind: Kind,
        donors: &[usize],
        dice: &mut Dice,
    ) -> Tenant {
        let Kind { copies, code } = kind;
        let owner = (space, host, Epoch(1));
        let borrower = Borrower::new(owner, LANES, donors, (copies, code), None, dice);
        Tenant {
            space,
            host,
            borrowers: vec![borrower],
            oracle: Oracle::new(space.0 << 24),
            pending: BTreeMap::new(),
            next_token: 0,
            epoch: 1,
            copies,
            code,
            recorded: BTreeMap::new(),
            decays: false,
            wholly_decayed: BTreeSet::new(),
            to_read_again: Vec::new(),
            is_reading_all: false,
            settled: true,
        }
    }

    pub(crate) fn tend(&mut self, pool: &mut Pool) {
        let (Tenant { borrowers, .. }, Pool { net, dice, .. }) = (&mut *self, &mut *pool);
        borrowers.last_mut().expect("there is always an owner").tend(net, dice);
        self.hear(pool);
    }

    /// As `Space::scrub`, with what a pager knows of what it has stored.
    pub(crate) fn scrub(&mut self, pool: &mut Pool) -> Option<Scrubbed> {
        let (Tenant { borrowers, oracle, pending, .. }, Pool { net, dice, .. }) =
            (&mut *self, &mut *pool);
        let is_leaving = |segment: u64| {
            pending.values().any(|pending| {
                matches!(pending, Pending::Free { .. } | Pending::Discard { .. })
                    && pending.segment() == Some(segment)
            })
        };
        let known = |page: u64| match oracle.certain(page) {
            Some(value) if value != 0 && !is_leaving(page / SEGMENT_PAGES) => Some(sum_of(value)),
            _ => None,
        };
        let owner = borrowers.last_mut().expect("there is always an owner");
        let scrubbed = owner.scrub(&known, net, dice);
        if let Some(Scrubbed::Run(segment, report)) = &scrubbed {
            pool.tally.repaired += report.repaired;
            pool.tally.found_lost += report.lost;
            if report.wrong.is_some() {
                assert!(self.wholly_decayed.contains(segment), "a copy is accused of nothing");
                pool.tally.given_up += 1;
            }
        }
        self.hear(pool);
        scrubbed
    }

    /// A page came damaged from a donor. As the pager does: it is read from others.
    fn came_damaged(
        &mut self,
        pool: &mut Pool,
        segment: u64,
        page: u32,
        mut avoid: Vec<DonorIndex>,
    ) {
        self.owner().suspect(segment, page);
        let Whereabouts::Held(group) = self.owner().map.whereabouts(segment) else { return };
        if self.is_page_right_nowhere(pool, segment, page, group) {
            assert!(
                !pool.conditions.is_calm,
                "page {page} of segment {segment} was right in a copy that left"
            );
            pool.tally.decayed_everywhere += 1;
            self.oracle.decayed(segment * SEGMENT_PAGES + u64::from(page));
        } else {
            // Only those that have sent it since one was mended.
            // Where there is a code, what several others give counts as one more.
            let givers = usize::from(self.copies) + usize::from(self.code.is_some());
            let surplus = (avoid.len() + 1).saturating_sub(givers);
            avoid.drain(..surplus);
            self.to_read_again.push((segment, page, avoid));
        }
    }

    pub(crate) fn owner(&mut self) -> &mut Borrower {
        self.borrowers.last_mut().expect("there is always an owner")
    }

    pub(crate) fn last(&self) -> &Borrower {
        self.borrowers.last().expect("there is always an owner")
    }

    pub(crate) fn token(&mut self, pending: Pending) -> u64 {
        self.next_token += 1;
        self.pending.insert(self.next_token, pending);
        self.next_token
    }

    fn is_busy(&self, segment: u64) -> bool {
        self.pending.values().any(|pending| pending.segment() == Some(segment))
    }

    fn is_being_zeroed(&self, segment: u64) -> bool {
        self.pending.values().any(|pending| {
            matches!(pending, Pending::Free { .. } | Pending::Discard { .. })
                && pending.segment() == Some(segment)
        })
    }

    pub(crate) fn work(&mut self, pool: &mut Pool) {
        let segment = pool.dice.below(SEGMENTS);
        if self.is_being_zeroed(segment) {
            return;
        }
        match pool.dice.below(100) {
            0..45 => self.write(pool, segment),
            45..90 => self.read(pool, segment),
            90..95 if !self.is_busy(segment) => self.free(pool, segment),
            95..98 if !self.is_busy(segment) => self.accept_losses(pool),
            98..100 if !self.is_busy(segment) => self.discard(pool, segment),
            _ => {}
        }
    }

    pub(crate) fn look(&mut self, pool: &mut Pool) {
        let segment = pool.dice.below(SEGMENTS);
        if !self.is_being_zeroed(segment) {
            self.read(pool, segment);
        }
    }

    fn some_pages(&mut self, pool: &mut Pool) -> Vec<u32> {
        let first = pool.dice.below(SEGMENT_PAGES);
        let count = 1 + pool.dice.below(SEGMENT_PAGES - first);
        (first as u32..(first + count) as u32).collect()
    }

    fn write(&mut self, pool: &mut Pool, segment: u64) {
        let mut pages = self.some_pages(pool);
        pages.retain(|page| self.oracle.may_write(segment * SEGMENT_PAGES + u64::from(*page)));
        if !pages.is_empty() {
            self.write_pages(pool, segment, pages);
        }
    }

    pub(crate) fn write_pages(&mut self, pool: &mut Pool, segment: u64, pages: Vec<u32>) {
        if !self.owner().allow_write(segment) {
            return;
        }
        let values: Vec<Value> = pages.iter().map(|_| self.oracle.fresh_value()).collect();
        for (page, value) in pages.iter().zip(&values) {
            self.oracle.write_begins(segment * SEGMENT_PAGES + u64::from(*page), *value);
        }
        let pending = Pending::Write { segment, pages: pages.clone(), values: values.clone() };
        let token = self.token(pending);
        // A page is always written through the same lane: see `SpaceError::Unreachable`.
        let lane = segment as usize % LANES;
        let (Tenant { borrowers, .. }, Pool { net, dice, .. }) = (&mut *self, &mut *pool);
        let owner = borrowers.last_mut().expect("there is always an owner");
        let contents = pages.into_iter().zip(values);
        owner.write(lane, token, segment, contents, net, dice);
        self.hear(pool);
    }

    fn read(&mut self, pool: &mut Pool, segment: u64) {
        let mut pages = self.some_pages(pool);
        pages.retain(|page| self.oracle.may_read(segment * SEGMENT_PAGES + u64::from(*page)));
        if !pages.is_empty() {
            self.read_pages(pool, segment, pages, Vec::new());
        }
    }

    pub(crate) fn read_pages(
        &mut self,
        pool: &mut Pool,
        segment: u64,
        pages: Vec<u32>,
        avoid: Vec<DonorIndex>,
    ) {
        let numbers: Vec<u64> =
            pages.iter().map(|page| segment * SEGMENT_PAGES + u64::from(*page)).collect();
        let key = self.oracle.read_begins(&numbers);
        let token =
            self.token(Pending::Read { key, segment, pages: pages.clone(), avoid: avoid.clone() });
        let lane = pool.dice.below(LANES as u64) as usize;
        let (Tenant { borrowers, .. }, Pool { net, dice, .. }) = (&mut *self, &mut *pool);
        let owner = borrowers.last_mut().expect("there is always an owner");
        owner.read(lane, token, segment, (&pages, &avoid), net, dice);
        self.hear(pool);
    }

    /// As `Space::free_segment`.
    fn free(&mut self, pool: &mut Pool, segment: u64) {
        if !self.owner().allow_write(segment) {
            return;
        }
        match self.owner().map.whereabouts(segment) {
            Whereabouts::Nowhere => {}
            Whereabouts::Lost(_) => {
                self.owner().map.freed(segment, &Group::new(Generation::default()));
                self.oracle.freed(segment);
                (0..SEGMENT_PAGES).for_each(|p| self.oracle.zeroed(segment * SEGMENT_PAGES + p));
            }
            Whereabouts::Held(_) => {
                let token = self.token(Pending::Free { segment });
                let (Tenant { borrowers, .. }, Pool { net, dice, .. }) = (&mut *self, &mut *pool);
                let owner = borrowers.last_mut().expect("there is always an owner");
                owner.free(token, segment, net, dice);
                self.hear(pool);
            }
        }
    }

    fn accept_losses(&mut self, pool: &mut Pool) {
        for segment in 0..SEGMENTS {
            let is_lost = matches!(self.owner().map.whereabouts(segment), Whereabouts::Lost(_));
            if is_lost && !self.is_busy(segment) {
                self.free(pool, segment);
            }
        }
    }

    /// As `Space::discard`.
    fn discard(&mut self, pool: &mut Pool, segment: u64) {
        if !self.owner().allow_write(segment) {
            return;
        }
        let pages = self.some_pages(pool);
        let (first, count) = (pages[0], pages.len() as u32);
        let token = self.token(Pending::Discard { segment, first, count });
        let (Tenant { borrowers, .. }, Pool { net, dice, .. }) = (&mut *self, &mut *pool);
        let owner = borrowers.last_mut().expect("there is always an owner");
        owner.discard(token, segment, (first, count), net, dice);
        self.hear(pool);
    }

    pub(crate) fn control(&mut self, pool: &mut Pool, donor: usize, job: Job) {
        let (Tenant { borrowers, .. }, Pool { net, dice, .. }) = (&mut *self, &mut *pool);
        let owner = borrowers.last_mut().expect("there is always an owner");
        owner.control(donor, job, net, dice);
        self.hear(pool);
    }

    pub(crate) fn renew(&mut self, known: &[usize], pool: &mut Pool) {
        let (Tenant { borrowers, .. }, Pool { net, dice, .. }) = (&mut *self, &mut *pool);
        let owner = borrowers.last_mut().expect("there is always an owner");
        owner.learn(known, dice);
        owner.renew(net, dice);
        self.hear(pool);
    }

    /// Takes in what the borrowers tell their workloads.
    pub(crate) fn hear(&mut self, pool: &mut Pool) {
        let last = self.borrowers.len() - 1;
        // It was given up for others that seemed to be there.
        for segment in self.borrowers[last].take_deserted() {
            match self.borrowers[last].map.whereabouts(segment) {
                // Which by then were found to be gone.
                Whereabouts::Lost(_) => self.oracle.losable(segment),
                _ => self.note_loss(pool, segment),
            }
        }
        // Seed 38094: by one who is replaced, and does not know it where no fence has come yet.
        for before in 0..last {
            for segment in self.borrowers[before].take_deserted() {
                self.note_loss(pool, segment);
            }
        }
        self.wholly_decayed.extend(std::mem::take(&mut self.borrowers[last].spoiled));
        for (stripe, coded) in self.borrowers[last].take_recorded() {
            match coded {
                Some(coded) => _ = self.recorded.insert(stripe, coded),
                None => _ = self.recorded.remove(&stripe),
            }
        }
        for index in 0..=last {
            for told in self.borrowers[index].take_told() {
                self.told(pool, told, index == last);
            }
        }
    }

    fn told(&mut self, pool: &mut Pool, told: Told, by_owner: bool) {
        let (token, ended) = match &told {
            Told::Shown { token, from, values, .. } => match &self.pending[token] {
                Pending::Read { pages, .. } => (*token, from + values.len() == pages.len()),
                other => panic!("pages for {other:?}"),
            },
            Told::Written { token, .. }
            | Told::Failed { token, .. }
            | Told::Control { token, .. } => (*token, true),
        };
        let pending = self.pending.get(&token).cloned();
        let pending = pending.unwrap_or_else(|| panic!("told twice of the end: {told:?}"));
        if ended {
            self.pending.remove(&token);
        }
        let why = match &told {
            Told::Failed { why, .. } | Told::Control { outcome: Err(why), .. } => Some(*why),
            _ => None,
        };
        match why {
            Some(Why::Lost { segment })
                if by_owner && self.is_right_nowhere(pool, segment, &pending) =>
            {
                pool.tally.decayed_everywhere += 1;
            }
            Some(Why::Lost { segment }) => {
                let unlisted = self.borrowers.iter().any(|borrower| !borrower.knows_all());
                // An earlier owner's extents are its successor's to give back.
                if by_owner && !unlisted {
                    self.oracle.assert_losable(segment);
                }
                pool.tally.lost += 1;
                pool.tally.lost_with_copies += u64::from(self.copies > 1);
            }
            Some(Why::Coded) => assert!(self.code.is_some(), "there is no code"),
            Some(Why::Interrupted) => pool.tally.interrupted += 1,
            Some(Why::Unreachable) => {
                pool.tally.unreachable += u64::from(!self.is_asked_again(&pending));
            }
            Some(Why::NoRoom) => pool.tally.no_room += 1,
            Some(Why::Fenced) => {
                assert!(!by_owner, "the owner is fenced");
                pool.tally.fenced += 1;
            }
            None => {}
        }
        let is_asked_again = self.is_asked_again(&pending);
        match (pending, told) {
            (
                Pending::Read { key, segment, pages, avoid },
                Told::Shown { from, values, giver, .. },
            ) => {
                let mut damaged = Vec::new();
                for (at, value) in (from..).zip(values) {
                    match value & DECAYED {
                        0 => self.oracle.read_shows(key, at, value, by_owner),
                        _ => damaged.push(pages[at]),
                    }
                }
                pool.tally.reads += 1;
                if ended {
                    self.oracle.read_ends(key);
                }
                for page in damaged.into_iter().filter(|_| by_owner) {
                    let avoid = avoid.iter().copied().chain(giver).collect();
                    self.came_damaged(pool, segment, page, avoid);
                }
            }
            (Pending::Read { key, segment, pages, .. }, _) => {
                self.oracle.read_ends(key);
                if why == Some(Why::Unreachable) && is_asked_again {
                    let pages = pages.into_iter().map(|page| (segment, page, Vec::new()));
                    self.to_read_again.extend(pages);
                }
            }
            // The outcome of an earlier owner's requests does not matter: their pages may have any
            // possible value until they are read.
            _ if !by_owner => {}
            (Pending::Write { segment, pages, values }, told) => {
                for (page, value) in pages.iter().zip(values) {
                    let number = segment * SEGMENT_PAGES + u64::from(*page);
                    match told {
                        Told::Written { generation, .. } => {
                            self.oracle.write_stored(number, value);
                            self.oracle.acknowledged(segment, generation);
                        }
                        _ if why == Some(Why::Coded) => self.oracle.write_refused(number, value),
                        _ => {
                            let settled = why != Some(Why::Unreachable);
                            self.oracle.write_failed(number, settled);
                        }
                    }
                }
            }
            (Pending::Free { segment }, _) => {
                for page in 0..SEGMENT_PAGES {
                    let number = segment * SEGMENT_PAGES + page;
                    match why {
                        None => self.oracle.zeroed(number),
                        // Freed after all, perhaps: then the next to ask finds it gone.
                        Some(_) => self.oracle.maybe_zeroed(number),
                    }
                }
                match why {
                    None => self.oracle.freed(segment),
                    Some(_) => self.oracle.losable(segment),
                }
            }
            (Pending::Discard { segment, first, count }, told) => {
                if let Told::Control { outcome: Ok(Some(generation)), .. } = told {
                    self.oracle.acknowledged(segment, generation);
                }
                for page in first..first + count {
                    let number = segment * SEGMENT_PAGES + u64::from(page);
                    match why {
                        None => self.oracle.zeroed(number),
                        Some(_) => self.oracle.maybe_zeroed(number),
                    }
                }
            }
            (Pending::FreeAll, _) => assert_eq!(why, None, "not everything was given back"),
        }
    }

    /// Whether a failed read is repeated at the end, because pages have gone bad. Several pages may
    /// be bad in too many shards. Copies to avoid may turn out to be the only ones.
    fn is_asked_again(&self, pending: &Pending) -> bool {
        let Pending::Read { pages, avoid, .. } = pending else { return false };
        let is_about_damage = pages.len() > 1 || !avoid.is_empty();
        self.is_reading_all && self.code.is_some() && self.decays && is_about_damage
    }

    /// The owner is dead, or only seems so: another one begins, while the first goes on.
    pub(crate) fn take_over(&mut self, known: &[usize], pool: &mut Pool) {
        self.epoch += 1;
        pool.tally.takeovers += 1;
        let successor = (self.space, self.host, Epoch(self.epoch));
        self.settled = false;
        // Done or not, nobody will be told.
        for pending in self.pending.values() {
            let (segment, pages) = match pending {
                Pending::Free { segment } => (*segment, 0..SEGMENT_PAGES as u32),
                Pending::Discard { segment, first, count } => (*segment, *first..first + count),
                _ => continue,
            };
            for page in pages {
                self.oracle.maybe_zeroed(segment * SEGMENT_PAGES + u64::from(page));
            }
        }
        let expected = self.oracle.expected();
        let (kept, left) = ((self.copies, self.code), Some((&expected, &self.recorded)));
        let successor = Borrower::new(successor, LANES, known, kept, left, &mut pool.dice);
        self.borrowers.push(successor);
    }

    /// The new owner knows all: nobody else's writes land any more.
    pub(crate) fn settle(&mut self, pool: &mut Pool) {
        self.settled = true;
        self.oracle.taken_over();
        // Zombie writes: must never be seen, and are not entered with the oracle.
        let index = self.borrowers.len() - 2;
        for segment in 0..3 {
            let value = self.oracle.fresh_value();
            let pending = Pending::Write { segment, pages: vec![0], values: vec![value] };
            let token = self.token(pending);
            let (Tenant { borrowers, .. }, Pool { net, dice, .. }) = (&mut *self, &mut *pool);
            borrowers[index].write(0, token, segment, [(0, value)].into_iter(), net, dice);
            self.hear(pool);
        }
    }
}
