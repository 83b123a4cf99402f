//! Spaces, the pool that they share, and everything that goes wrong with it all. At the end,
//! nothing is lost that need not be, and everything is given back.

use crate::borrower::{Borrower, Job, SEGMENT_PAGES, SEGMENTS, Scrubbed};
use crate::cluster::{Borrowed, Cluster};
use crate::dice::Dice;
use crate::donor::Donor;
use crate::network::{Asked, Event, Faults, Host, Network, ToDonor};
use crate::pool::Pool;
use crate::tally::Tally;
use crate::tenant::{Kind, Pending, Tenant};
use hecaton_memory::SpaceId;
use hecaton_space::code::Code;
use hecaton_space::group::Place;
use hecaton_space::lookup::Whereabouts;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(20);

/// How long a cluster has to come together before its first space begins.
const TO_GATHER: Duration = Duration::from_millis(500);

pub(crate) struct World {
    pub(crate) pool: Pool,
    tenants: Vec<Tenant>,
    /// Managers and nodes. Without them everybody knows all donors, and those drain as they like.
    cluster: Option<Cluster>,
}

impl World {
    /// One space, of which nothing is coded.
    pub(crate) fn new(seed: u64) -> World {
        World::of_one(seed, Dice::new(seed), None)
    }

    /// One space in which what has gone cold is coded.
    pub(crate) fn coded(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let code = some_code(&mut dice);
        World::of_one(seed, dice, Some(code))
    }

    fn of_one(seed: u64, mut dice: Dice, code: Option<Code>) -> World {
        let donor_count = match code {
            None => 2 + dice.below(3) as usize,
            Some(code) => code.shards() + dice.below(3) as usize,
        };
        let (faults, badness) = some_faults(seed, &mut dice);
        let kind = some_kind(code, donor_count, &mut dice);
        let donors = some_donors(donor_count, &[kind], &mut dice);
        let numbers: Vec<usize> = (0..donor_count).collect();
        let mut tenant = Tenant::new((SpaceId(77), Host(0)), kind, &numbers, &mut dice);
        let moves = dice.below(2) == 0;
        tenant.decays = kind.copies > 1 && dice.below(2) == 0;
        if kind.copies > 1 || moves {
            tenant.oracle.expect_copies();
        }
        let mut pool = Pool::new(dice, Network::new(donor_count, faults), donors);
        pool.conditions.moves = moves;
        pool.conditions.cuts_one_way = seed % 8 == 6;
        pool.conditions.parks = moves && !seed.is_multiple_of(3);
        let is_calm = moves && tenant.decays && seed.is_multiple_of(2);
        let is_calm = is_calm && badness == 0 && faults.garbled == 0;
        pool.conditions.is_calm = is_calm && code.is_none();
        World { pool, tenants: vec![tenant], cluster: None }
    }

    /// Managers, nodes, and several spaces of all kinds, which want the same memory. In every
    /// fourth run, one manager has the registry in a file; not in the runs that are kept by name.
    pub(crate) fn whole(seed: u64) -> World {
        let mut dice = Dice::new(seed);
        let count = 2 + dice.below(2) as usize;
        let code = (dice.below(2) == 0).then(|| some_code(&mut dice));
        let donor_count = code.map_or(2, |code| code.shards()) + dice.below(3) as usize;
        let (mut faults, badness) = some_faults(seed, &mut dice);
        faults.damaged = dice.below(8) * badness;
        let kinds: Vec<Kind> = (0..count)
            .map(|at| some_kind(code.filter(|_| at == 0), donor_count, &mut dice))
            .collect();
        let donors = some_donors(donor_count, &kinds, &mut dice);
        let has_file = seed.is_multiple_of(4);
        let cluster = Cluster::new(&donors, has_file, &mut dice);
        let mut pool = Pool::new(dice, Network::new(donor_count, faults), donors);
        let moves = pool.dice.below(4) > 0;
        let decays = pool.dice.below(3) == 0;
        pool.conditions.moves = moves;
        pool.conditions.cuts_one_way = pool.dice.below(2) == 0;
        pool.conditions.parks = moves && pool.dice.below(3) > 0;
        let mut world = World { pool, tenants: Vec::new(), cluster: Some(cluster) };
        while world.pool.net.now < TO_GATHER {
            world.advance(TICK);
        }
        for (at, kind) in kinds.into_iter().enumerate() {
            let host = Host(at % donor_count);
            let known = world.known_at(host);
            let space = (SpaceId(1 + at as u64), host);
            let mut tenant = Tenant::new(space, kind, &known, &mut world.pool.dice);
            tenant.decays = decays && kind.copies > 1;
            if kind.copies > 1 || moves {
                tenant.oracle.expect_copies();
            }
            world.tenants.push(tenant);
        }
        world
    }

    pub(crate) fn run(&mut self) {
        let is_any_coded = self.tenants.iter().any(|tenant| tenant.code.is_some());
        for step in 0..400 {
            self.advance(TICK);
            let mut active = Vec::new();
            for (at, tenant) in self.tenants.iter_mut().enumerate() {
                if tenant.settled {
                    active.push(at);
                } else if tenant.last().knows_all() {
                    tenant.settle(&mut self.pool);
                }
            }
            if active.is_empty() {
                continue;
            }
            // Now and then everything is left alone for a while, and only read after that.
            let phase = if is_any_coded { step / 80 % 3 } else { 0 };
            for &at in &active {
                let (pool, tenant) = (&mut self.pool, &mut self.tenants[at]);
                match phase {
                    0 => (0..1 + pool.dice.below(3)).for_each(|_| tenant.work(pool)),
                    1 => {}
                    _ => (0..1 + pool.dice.below(2)).for_each(|_| tenant.look(pool)),
                }
            }
            // While segments are coded, more goes wrong.
            self.go_wrong(if phase == 0 { 400 } else { 160 }, &active);
            for &at in &active {
                let (pool, tenant) = (&mut self.pool, &mut self.tenants[at]);
                if tenant.copies > 1 {
                    tenant.scrub(pool);
                }
                if step % 4 == 0 {
                    tenant.tend(pool);
                }
                if step % 10 == 0 {
                    tenant.check_codes(pool);
                }
                if step % 50 == 49 {
                    self.renew(at);
                }
            }
            if step % 10 == 0 {
                self.check_owners();
            }
        }
        self.heal();
        for at in 0..self.tenants.len() {
            if self.tenants[at].decays {
                self.compare_everything(at);
            }
        }
        if self.pool.conditions.moves {
            self.recall_for_good();
        }
        self.read_everything();
        self.count();
        self.release();
    }

    /// Something goes wrong, in some of so many cases.
    fn go_wrong(&mut self, chances: u64, active: &[usize]) {
        let moves = self.pool.conditions.moves;
        let decays = self.tenants.iter().any(|tenant| tenant.decays);
        match self.pool.dice.below(chances) {
            0..5 if self.pool.conditions.is_calm => {}
            0..2 => {
                let (donor, held) = self.pool.restart_a_donor();
                if let Some(cluster) = &mut self.cluster {
                    cluster.lose_memory(donor, &mut self.pool);
                }
                held.into_iter().for_each(|(space, segment)| self.note_loss(space, segment));
            }
            2..4 => self.pool.silence_a_donor(),
            4..5 => {
                let at = active[self.some_of(active.len())];
                self.take_over(at);
            }
            5..7 if moves => match &mut self.cluster {
                None => self.pool.drain_a_donor(),
                Some(cluster) => cluster.order_drain(&mut self.pool),
            },
            7..11 if moves => match &mut self.cluster {
                None => self.pool.recall_at_a_donor(),
                Some(cluster) => cluster.order_recall(&mut self.pool),
            },
            11..15 if moves => self.pool.change_a_host(),
            15..23 if decays => {
                let at = self.some_of(self.tenants.len());
                if self.tenants[at].decays {
                    self.tenants[at].decay(&mut self.pool);
                }
            }
            23..27 if self.pool.conditions.parks => self.pool.change_a_disk(),
            27..51 => {
                if let Some(cluster) = &mut self.cluster {
                    cluster.go_wrong(&mut self.pool);
                }
            }
            _ => {}
        }
    }

    /// One of so many. Nothing is drawn where there is no choice.
    fn some_of(&mut self, count: usize) -> usize {
        if count == 1 { 0 } else { self.pool.dice.below(count as u64) as usize }
    }

    /// The donors that are known at a host.
    fn known_at(&self, host: Host) -> Vec<usize> {
        match &self.cluster {
            None => (0..self.pool.donors.len()).collect(),
            Some(cluster) => cluster.known_at(host),
        }
    }

    /// Another owner of a space begins. It knows the donors that its node knows or has known, and
    /// those that its predecessor knew and handed down.
    fn take_over(&mut self, at: usize) {
        let tenant = &mut self.tenants[at];
        let mut known = tenant.last().numbers().to_vec();
        if let Some(cluster) = &self.cluster {
            known.extend(cluster.ever_known_at(tenant.host));
        }
        known.sort_unstable();
        known.dedup();
        tenant.take_over(&known, &mut self.pool);
        self.advance(Duration::ZERO);
    }

    fn note_loss(&mut self, space: SpaceId, segment: u64) {
        let tenant = self.tenants.iter_mut().find(|tenant| tenant.space == space);
        tenant.expect("extents are of spaces").note_loss(&self.pool, segment);
    }

    fn hear(&mut self) {
        for tenant in &mut self.tenants {
            tenant.hear(&mut self.pool);
        }
    }

    fn renew(&mut self, at: usize) {
        let known = self.known_at(self.tenants[at].host);
        self.tenants[at].renew(&known, &mut self.pool);
    }

    fn renew_all(&mut self) {
        (0..self.tenants.len()).for_each(|at| self.renew(at));
    }

    fn tend_all(&mut self) {
        for tenant in &mut self.tenants {
            tenant.tend(&mut self.pool);
        }
    }

    /// Lets time pass.
    fn advance(&mut self, time: Duration) {
        let until = self.pool.net.now + time;
        while let Some(event) = self.pool.net.next(until) {
            self.happen(event);
            self.hear();
        }
        let pool = &mut self.pool;
        pool.net.now = until;
        for borrower in self.tenants.iter_mut().flat_map(|tenant| &mut tenant.borrowers) {
            borrower.tick(&mut pool.net, &mut pool.dice);
        }
        if let Some(cluster) = &mut self.cluster {
            cluster.tick(pool, borrowed(&self.tenants));
        }
        let mut expired = Vec::new();
        for donor in &mut pool.donors {
            donor.reclaim();
            expired.extend(donor.expire(until.as_millis() as u64));
        }
        pool.tally.expired += expired.len() as u64;
        expired.into_iter().for_each(|(space, segment)| self.note_loss(space, segment));
        self.hear();
        for tenant in &mut self.tenants {
            for (segment, page, avoid) in std::mem::take(&mut tenant.to_read_again) {
                if tenant.oracle.may_read(segment * SEGMENT_PAGES + u64::from(page)) {
                    tenant.read_pages(&mut self.pool, segment, vec![page], avoid);
                }
            }
        }
    }

    fn happen(&mut self, event: Event) {
        let pool = &mut self.pool;
        let mut borrowers = self.tenants.iter_mut().flat_map(|tenant| &mut tenant.borrowers);
        let now_ms = pool.net.now.as_millis() as u64;
        match event {
            Event::AtDonor(conn, message) => match message {
                ToDonor::Request { id, asked: asked @ Asked::Fill { .. }, .. } => {
                    pool.fill_begins(conn, id, &asked);
                }
                ToDonor::Request { id, asked: asked @ Asked::Repair { .. }, .. } => {
                    pool.repair_begins(conn, id, &asked);
                }
                message => {
                    let donor = pool.net.donor_of(conn);
                    pool.donors[donor].receive(conn, message, &mut pool.net, &mut pool.dice);
                }
            },
            Event::Filled { conn, id, extent, first, pages } => {
                let donor = &mut pool.donors[pool.net.donor_of(conn)];
                let Some(who) = donor.who(conn) else { return };
                let filled = donor.fill(who, extent, first, &pages, now_ms);
                pool.answer_fill(conn, id, filled);
            }
            Event::Mended { conn, id, extent, pages } => {
                let donor = &mut pool.donors[pool.net.donor_of(conn)];
                let Some(who) = donor.who(conn) else { return };
                let mended = donor.mend(who, extent, &pages, now_ms);
                pool.answer_fill(conn, id, mended);
            }
            Event::DonorSeesEnd(conn) => {
                let donor = pool.net.donor_of(conn);
                pool.donors[donor].ended(conn);
            }
            Event::AtBorrower(conn, message) => {
                if let Some(borrower) = borrowers.find(|b| b.owns(conn)) {
                    borrower.receive(conn, message, &mut pool.net, &mut pool.dice);
                }
            }
            Event::DonorSeesGarbled(conn) => {
                pool.net.sever(conn, &mut pool.dice);
                self.happen(Event::DonorSeesEnd(conn));
            }
            Event::BorrowerSeesGarbled(conn) => {
                pool.net.sever(conn, &mut pool.dice);
                self.happen(Event::BorrowerSeesEnd(conn));
            }
            Event::BorrowerSeesEnd(conn) => {
                if let Some(borrower) = borrowers.find(|b| b.owns(conn)) {
                    borrower.ended(conn, &mut pool.net, &mut pool.dice);
                }
            }
            Event::Letter(letter) => {
                if let Some(cluster) = &mut self.cluster {
                    cluster.receive(letter, pool);
                }
            }
        }
    }

    /// No extent has two owners, and whoever counts on one is the one to whom it was lent.
    fn check_owners(&self) {
        let mut owned = BTreeSet::new();
        for tenant in &self.tenants {
            for (segment, group) in tenant.groups() {
                for member in group.members() {
                    let place = member.place;
                    let number = tenant.last().number_of(place.donor);
                    let is_first = owned.insert((number, place.boot, place.extent));
                    assert!(is_first, "{place:?} has two owners");
                    let donor = &self.pool.donors[number];
                    let lent = donor.table.extents().find(|lent| lent.extent == place.extent);
                    if let Some(lent) = lent.filter(|_| donor.boot == place.boot) {
                        assert_eq!((lent.space, lent.segment), (tenant.space, segment));
                    }
                }
            }
        }
    }

    /// A donor gets back what others have room for, or have a copy of.
    fn recall_for_good(&mut self) {
        let donor = self.pool.dice.below(self.pool.donors.len() as u64) as usize;
        for donor in &self.pool.donors {
            let all = donor.pages();
            assert_eq!(donor.table.limit_pages(), all, "the host has been calm for long");
            assert_eq!(donor.table.parked_pages(), 0, "there has been room for long");
        }
        let limit = self.pool.dice.below(self.pool.donors[donor].pages() / 2);
        match &mut self.cluster {
            None => self.pool.set_limit(donor, limit),
            Some(cluster) => {
                cluster.order_limit(donor, Some(limit));
                self.until_obeyed();
            }
        }
        if self.pool.donors[donor].table.excess_pages() == 0 {
            return;
        }
        // Two others are asked after ten seconds for what one cannot give; then all are asked anew.
        let patience_ms = if self.tenants.len() == 1 { 0 } else { 22_000 };
        for step in 0.. {
            let now_ms = self.pool.net.now.as_millis() as u64;
            let stalled_ms = self.pool.donors[donor].table.stalled_ms(now_ms);
            if step >= 800 && stalled_ms >= patience_ms {
                break;
            }
            assert!(step < 20_000, "extents come and go for ever");
            if step % 50 == 0 {
                if self.pool.donors[donor].table.excess_pages() == 0 {
                    self.pool.tally.given_back += 1;
                    return;
                }
                self.renew_all();
            }
            self.advance(TICK);
            self.tend_all();
        }
        for lent in self.pool.donors[donor].table.extents() {
            let tenant = self.tenants.iter().find(|tenant| tenant.space == lent.space);
            let owner = tenant.expect("extents are of spaces").last();
            let Whereabouts::Held(group) = owner.map.whereabouts(lent.segment) else {
                panic!("segment {} is not held, but its extent is", lent.segment);
            };
            let is_at = |at: usize| {
                group.members().iter().any(|member| owner.number_of(member.place.donor) == at)
            };
            assert!(is_at(donor), "an extent of segment {} is forgotten", lent.segment);
            assert_eq!(group.whole().count(), 1, "segment {} has another copy", lent.segment);
            for (at, other) in self.pool.donors.iter().enumerate().filter(|(at, _)| !is_at(*at)) {
                let room = other.table.lendable_pages();
                assert!(room < SEGMENT_PAGES, "donor {at} has room for segment {}", lent.segment);
            }
        }
        self.pool.tally.nobody_had_room += 1;
        if self.pool.conditions.parks {
            let donor = &self.pool.donors[donor];
            let (in_memory, limit) = (donor.memory_pages(), donor.table.limit_pages());
            assert!(in_memory <= limit, "{in_memory} pages are in memory, and {limit} should be");
        }
    }

    /// With nothing else going on, every page that is right in one copy becomes so in all. Pages
    /// that are right in none are found.
    fn compare_everything(&mut self, at: usize) {
        let (mut rounds, mut before) = (0, BTreeMap::new());
        let mut lost: BTreeMap<u64, u64> = BTreeMap::new();
        for _ in 0..5000 {
            self.advance(TICK);
            if rounds < 2 {
                self.tenants[at].tend(&mut self.pool);
            }
            match self.tenants[at].scrub(&mut self.pool) {
                Some(Scrubbed::Round) => {
                    rounds += 1;
                    if rounds == 3 {
                        break;
                    }
                    // A donor that had no source for a copy is heard again.
                    self.renew_all();
                    (0..10).for_each(|_| self.advance(TICK));
                    before = self.tenants[at].groups();
                    lost.clear();
                }
                Some(Scrubbed::Run(segment, report)) => {
                    *lost.entry(segment).or_default() += report.lost;
                }
                None => {}
            }
        }
        assert_eq!(rounds, 3, "the scrub never ends");
        let tenant = &self.tenants[at];
        for (segment, group) in tenant.groups() {
            let places: Vec<Place> = group.whole().collect();
            let is_as_before = before.get(&segment) == Some(&group);
            // One may have gone with its lease, which its owner does not know yet.
            let owner = tenant.last();
            let is_there = |place: &Place| {
                let is_known = owner.map.donor(place.donor).reachable;
                is_known && self.pool.is_there(owner, *place)
            };
            let is_as_before = is_as_before && places.iter().all(is_there);
            if !is_as_before || places.len() < 2 || tenant.wholly_decayed.contains(&segment) {
                continue;
            }
            let mut right_nowhere = 0;
            for page in 0..SEGMENT_PAGES as u32 {
                let right = places
                    .iter()
                    .filter_map(|place| tenant.is_right(&self.pool, segment, page, *place));
                let right: Vec<bool> = right.collect();
                assert!(
                    right.windows(2).all(|pair| pair[0] == pair[1]),
                    "page {page} of segment {segment} is not repaired"
                );
                right_nowhere += u64::from(right.first() == Some(&false));
            }
            assert_eq!(lost.get(&segment), Some(&right_nowhere), "lost pages of {segment}");
        }
    }

    /// The network is good again; everything that is under way ends.
    fn heal(&mut self) {
        self.pool.net.heal();
        for donor in 0..self.pool.donors.len() {
            let parks = self.pool.conditions.parks;
            self.pool.donors[donor].host_pages = u64::MAX;
            self.pool.donors[donor].disk_pages = if parks { u64::MAX } else { 0 };
            if self.cluster.is_none() {
                self.pool.donors[donor].draining = false;
                self.pool.set_limit(donor, self.pool.donors[donor].pages());
            }
        }
        if let Some(cluster) = &mut self.cluster {
            cluster.heal();
            self.until_obeyed();
            self.restart_managers();
            self.lift_orders();
            self.restart_managers();
        }
        for _ in 0..500 {
            self.advance(TICK);
            self.tend_all();
            let mut is_over = true;
            for at in 0..self.tenants.len() {
                let tenant = &mut self.tenants[at];
                if tenant.settled {
                    let told_all = tenant.borrowers.iter().all(Borrower::is_idle);
                    is_over &= told_all && tenant.pending.is_empty();
                    continue;
                }
                is_over = false;
                if tenant.last().knows_all() {
                    tenant.settle(&mut self.pool);
                } else {
                    self.renew(at);
                }
            }
            if is_over {
                break;
            }
        }
        for tenant in &self.tenants {
            assert!(tenant.pending.is_empty(), "never ended: {:?}", tenant.pending);
        }
        self.renew_all();
        for _ in 0..50 {
            self.advance(TICK);
        }
    }

    /// On a good network, what was asked of the donors is done, as it was asked last.
    fn until_obeyed(&mut self) {
        for step in 0..600 {
            self.advance(TICK);
            if step % 50 == 49 {
                self.renew_all();
            }
            let Some(cluster) = &self.cluster else { return };
            if cluster.is_obeyed(&self.pool) {
                return;
            }
        }
        let trouble = self.cluster.as_ref().map(|cluster| cluster.trouble(&self.pool));
        panic!("the cluster never comes together: {trouble:?}");
    }

    /// Nothing that was acknowledged is forgotten.
    fn restart_managers(&mut self) {
        let Some(cluster) = &mut self.cluster else { return };
        cluster.restart_managers(&self.pool);
        self.advance(TICK);
        self.until_obeyed();
    }

    /// All donors lend what they have.
    fn lift_orders(&mut self) {
        for donor in 0..self.pool.donors.len() {
            for lift in [Cluster::order_no_drain, Cluster::order_no_limit] {
                if let Some(cluster) = &mut self.cluster {
                    lift(cluster, donor);
                }
                self.until_obeyed();
            }
        }
    }

    fn read_everything(&mut self) {
        // First what failed is written again, once; what is lost or finds no room stays as it is.
        for tenant in &mut self.tenants {
            for number in tenant.oracle.dirty_pages() {
                let page = (number % SEGMENT_PAGES) as u32;
                tenant.write_pages(&mut self.pool, number / SEGMENT_PAGES, vec![page]);
            }
        }
        self.drain();
        let before = self.pool.tally.unreachable + self.pool.tally.interrupted;
        for tenant in &mut self.tenants {
            tenant.is_reading_all = true;
            for segment in 0..SEGMENTS {
                let may_read =
                    |page: &u32| tenant.oracle.may_read(segment * SEGMENT_PAGES + u64::from(*page));
                let pages: Vec<u32> = (0..SEGMENT_PAGES as u32).filter(may_read).collect();
                if !pages.is_empty() {
                    tenant.read_pages(&mut self.pool, segment, pages, Vec::new());
                }
            }
        }
        self.drain();
        let after = self.pool.tally.unreachable + self.pool.tally.interrupted;
        assert_eq!(before, after, "failures on a good network");
    }

    fn drain(&mut self) {
        let is_over =
            |tenant: &Tenant| tenant.pending.is_empty() && tenant.to_read_again.is_empty();
        for _ in 0..500 {
            self.advance(TICK);
            if self.tenants.iter().all(is_over) {
                return;
            }
        }
        let left: Vec<_> = self.tenants.iter().map(|tenant| &tenant.pending).collect();
        panic!("never ended: {left:?}");
    }

    fn release(&mut self) {
        for tenant in &mut self.tenants {
            for donor in 0..tenant.last().numbers().len() {
                let token = tenant.token(Pending::FreeAll);
                tenant.control(&mut self.pool, donor, Job::FreeAll { token });
            }
        }
        self.drain();
        self.advance(TICK);
        for (index, donor) in self.pool.donors.iter().enumerate() {
            assert!(donor.is_all_free(), "donor {index} has not got everything back");
        }
        for borrower in self.tenants.iter().flat_map(|tenant| &tenant.borrowers) {
            assert!(borrower.is_idle());
        }
    }

    /// Adds the counters of borrowers and donors.
    fn count(&mut self) {
        let tally = &mut self.pool.tally;
        for borrower in self.tenants.iter().flat_map(|tenant| &tenant.borrowers) {
            tally.copies_made += borrower.copies_made;
            tally.coded += borrower.coded;
            tally.thawed += borrower.thawed;
            tally.rebuilt += borrower.rebuilt;
            tally.decoded += borrower.decoded;
            tally.copies_left += borrower.copies_left;
            tally.repaired_for_moves += borrower.repaired_for_moves;
        }
        tally.garbled += self.pool.net.garbled;
        for donor in &self.pool.donors {
            tally.parked += donor.parked;
            tally.fetched += donor.fetched;
        }
        if let Some(cluster) = &self.cluster {
            cluster.count(tally);
        }
    }

    pub(crate) fn into_tally(self) -> Tally {
        self.pool.tally
    }
}

/// Pages that consumers have at donors, as the consumers know.
fn borrowed(tenants: &[Tenant]) -> Borrowed {
    let mut borrowed = Borrowed::new();
    for tenant in tenants {
        let of_node = borrowed.entry(tenant.host.0).or_default();
        let owner = tenant.last();
        for (number, donor) in owner.numbers().iter().zip(owner.map.donors()) {
            *of_node.entry(*number).or_default() += donor.extents * SEGMENT_PAGES;
        }
    }
    borrowed
}

fn some_code(dice: &mut Dice) -> Code {
    let (data, parity) = [(2, 1), (3, 1), (3, 2), (4, 2)][dice.below(4) as usize];
    Code::new(data, parity).expect("a code")
}

/// Every third run is on a good network, so that other faults show alone. In every fourth run
/// messages are garbled, on a good network or a bad one; not in the runs that are kept by name.
fn some_faults(seed: u64, dice: &mut Dice) -> (Faults, u64) {
    let badness = dice.below(3);
    let mut rate = |most: u64| if badness == 0 { 0 } else { dice.below(most * badness) };
    let (dropped, repeated, cut, slow) = (rate(10), rate(10), rate(15), rate(40));
    let garbled = if matches!(seed % 8, 4 | 6) { 1 + seed / 8 % 12 } else { 0 };
    let faults = Faults { dropped, repeated, cut, slow, damaged: 0, garbled };
    (faults, badness)
}

fn some_kind(code: Option<Code>, donors: usize, dice: &mut Dice) -> Kind {
    let copies = match code {
        None => 1 + dice.below(3.min(donors as u64)) as u8,
        // With a single parity, three copies could all be lost that two would not.
        Some(code) => 2 + dice.below(code.parity() as u64) as u8,
    };
    Kind { copies, code }
}

/// Together with a bit less or a lot more than the spaces need.
fn some_donors(count: usize, kinds: &[Kind], dice: &mut Dice) -> Vec<Donor> {
    let copies: u64 = kinds.iter().map(|kind| u64::from(kind.copies)).sum();
    let need = SEGMENTS * SEGMENT_PAGES * copies / count as u64;
    let pages = need.next_power_of_two() / 2 + dice.below(2 * need);
    (0..count).map(|n| Donor::new(pages, 1 + n as u64)).collect()
}
