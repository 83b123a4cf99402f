//! A borrower in the simulation: the space's map and its lanes' requests, exactly those of the crate,
//! with simulated connections where `Space`, `Lane` and the control link have sockets.

use crate::dice::Dice;
use crate::network::{
    Answered, Asked, ConnId, DECAYED, Network, ToBorrower, ToDonor, Value, sum_of,
};
use hecaton_memory::{Epoch, ExtentId, Generation};
use hecaton_space::Site;
use hecaton_space::flights::{Cause, Limits, Link, Slot};
use hecaton_space::group::{DonorIndex, Group, Place};
use hecaton_space::lookup::Whereabouts;
use hecaton_space::map::{Declined, Expected, Map, Shape, Take};
use hecaton_space::requests::{End as Ended, Groups, Requests, Writing};
use hecaton_space::scrub::{Ask, Cursor, Inspection, Known, Report};
use hecaton_space::upkeep::Step;
use hecaton_transport::protocol::{HeldExtent, MAX_HELD, Refusal};
use hecaton_transport::window::{Window, WindowLimits};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

pub(crate) const SEGMENT_ORDER: u8 = 3;
pub(crate) const SEGMENT_PAGES: u64 = 1 << SEGMENT_ORDER;
pub(crate) const SEGMENTS: u64 = 12;
const PATIENCE: Duration = Duration::from_millis(3000);
const STALL: Duration = Duration::from_millis(700);
const FAILOVER: Duration = Duration::from_millis(150);
/// Pages that one request copies from donor to donor.
const FILL_PAGES: u32 = 3;
/// Pages that are compared at a time.
const SCRUB_PAGES: u32 = 5;
const WINDOW: WindowLimits = WindowLimits { requests: 6, payload_bytes: 20 << 12 };

/// What the workload is told.
#[derive(Debug)]
pub(crate) enum Told {
    Shown {
        token: u64,
        from: usize,
        values: Vec<Value>,
        giver: Option<DonorIndex>,
    },
    Written {
        token: u64,
        generation: Generation,
    },
    Failed {
        token: u64,
        why: Why,
    },
    /// A control job of the workload is done, or not. After a discard the segment's members have at
    /// least that generation.
    Control {
        token: u64,
        outcome: Result<Option<Generation>, Why>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    Lost { segment: u64 },
    Unreachable,
    Interrupted,
    Fenced,
    NoRoom,
}

/// What has come of the scrub.
#[derive(Debug)]
pub(crate) enum Scrubbed {
    Run(u64, Report),
    Round,
}

/// A control request that the workload, or the borrower itself, wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    Renew,
    Take { segment: u64, generation: Generation },
    FreeStray { segment: u64, extent: Option<ExtentId> },
    Free { token: u64, segment: u64, place: Place, only: bool },
    Discard { token: u64, place: Place, only: bool, generation: Generation },
    FreeAll { token: u64 },
    Join { segment: u64 },
    Fill { segment: u64, to: Place, from: Place, first: u32 },
    Confirm { segment: u64, to: Place, generation: Generation },
    Leave { segment: u64, from: Place, kept: Place },
    Verify { segment: u64, place: Place, first: u32, count: u32 },
    Repair { segment: u64, to: Place, from: Place, first: u32, count: u32 },
}

/// A discard that is under way, as `Space::discard_in` does it.
#[derive(Clone, Debug)]
struct Discard {
    segment: u64,
    first: u32,
    count: u32,
    done: Vec<Place>,
    brought: Generation,
    failed: Option<Why>,
}

/// A segment that is being freed at several donors.
#[derive(Clone, Copy, Debug)]
struct Free {
    segment: u64,
    group: Group,
    left: usize,
    failed: Option<Why>,
}

enum Stage {
    Closed,
    Opening,
    Fencing,
    Listing(Vec<HeldExtent>),
    Ready,
}

/// The control link to one donor.
struct Control {
    lane: u64,
    conn: Option<ConnId>,
    window: Window,
    stage: Stage,
    boot: u64,
    begun: Duration,
    since: Duration,
    fresh: u32,
    jobs: VecDeque<(Job, Duration)>,
    asked: bool,
}

/// A lane's link to one donor.
struct DonorLink {
    lane: u64,
    conn: Option<ConnId>,
    window: Window,
    open: bool,
    boot: u64,
    begun: Duration,
    wants: (bool, bool),
}

#[derive(Debug)]
struct Write {
    token: u64,
    segment: u64,
    pages: Vec<u32>,
    values: Vec<Value>,
    since: Duration,
    /// What it has become, and when.
    writing: Option<(Writing, Duration)>,
}

struct Lane {
    requests: Requests,
    links: Vec<DonorLink>,
    /// Writes that wait for an extent, a connection, or room: one at a time, as the call blocks.
    writes: VecDeque<Write>,
}

pub(crate) struct Borrower {
    pub(crate) map: Map,
    pub(crate) fenced: bool,
    epoch: Epoch,
    adopted: bool,
    lanes: Vec<Lane>,
    controls: Vec<Control>,
    told: Vec<Told>,
    conns: BTreeMap<ConnId, End>,
    copies: usize,
    discards: BTreeMap<u64, Discard>,
    frees: BTreeMap<u64, Free>,
    /// The segment that the upkeep is at, with the donors that have declined.
    tending: Option<(u64, Vec<DonorIndex>)>,
    pub(crate) copies_made: u64,
    pub(crate) copies_left: u64,
    cursor: Cursor,
    /// What is being compared, and whether a donor is asked for it.
    inspection: Option<(Inspection, bool)>,
    /// Segments and first pages of runs to compare out of turn.
    suspects: Vec<(u64, u32)>,
    /// Segments of which a member was given up.
    deserted: Vec<u64>,
}

/// The map, with a note of who is given up.
struct Noted<'a> {
    map: &'a mut Map,
    deserted: &'a mut Vec<u64>,
}

impl Groups for Noted<'_> {
    fn whereabouts(&mut self, segment: u64) -> Whereabouts {
        self.map.whereabouts(segment)
    }

    fn desert(&mut self, segment: u64, place: Place) -> bool {
        self.deserted.push(segment);
        self.map.desert(segment, place)
    }

    fn gone(&mut self, segment: u64, place: Place) {
        self.map.gone(segment, place);
    }
}

#[derive(Clone, Copy)]
enum End {
    Lane(usize, usize),
    Control(usize),
}

fn index_of(donor: usize) -> DonorIndex {
    DonorIndex(donor as u32)
}

impl Borrower {
    pub(crate) fn new(
        epoch: Epoch,
        lanes: usize,
        donors: usize,
        copies: u8,
        expected: Option<&BTreeMap<u64, Expected>>,
        dice: &mut Dice,
    ) -> Self {
        let shape = Shape { segments: SEGMENTS, segment_pages: SEGMENT_PAGES, copies, epoch };
        let adopted = expected.is_some();
        let mut map = match expected {
            Some(expected) => Map::adopting(shape, expected),
            None => Map::new(shape),
        };
        for donor in 0..donors {
            let name = format!("donor-{donor}");
            map.donor_named(&name, &Site::unplaced(&name), adopted);
        }
        let limits = Limits { patience: PATIENCE, stall: STALL };
        let mut link = |_| DonorLink {
            lane: dice.next(),
            conn: None,
            window: Window::new(WINDOW),
            open: false,
            boot: 0,
            begun: Duration::ZERO,
            wants: (false, false),
        };
        let lanes = (0..lanes).map(|_| Lane {
            requests: Requests::new(limits, FAILOVER),
            links: (0..donors).map(&mut link).collect(),
            writes: VecDeque::new(),
        });
        let lanes = lanes.collect();
        let controls = (0..donors).map(|_| Control {
            lane: dice.next(),
            conn: None,
            window: Window::new(WINDOW),
            stage: Stage::Closed,
            boot: 0,
            begun: Duration::ZERO,
            since: Duration::ZERO,
            fresh: 0,
            jobs: VecDeque::from([(Job::Renew, Duration::ZERO)]),
            asked: false,
        });
        let controls = controls.collect();
        Borrower {
            map,
            fenced: false,
            epoch,
            adopted,
            lanes,
            controls,
            told: Vec::new(),
            conns: BTreeMap::new(),
            copies: usize::from(copies),
            discards: BTreeMap::new(),
            frees: BTreeMap::new(),
            tending: None,
            copies_made: 0,
            copies_left: 0,
            cursor: Cursor::default(),
            inspection: None,
            suspects: Vec::new(),
            deserted: Vec::new(),
        }
    }

    /// Whether every donor has told what it holds, and so is fenced.
    pub(crate) fn knows_all(&self) -> bool {
        self.map.unlisted().is_none()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lane| lane.requests.is_empty() && lane.writes.is_empty())
            && self.controls.iter().all(|control| control.jobs.is_empty())
    }

    pub(crate) fn owns(&self, conn: ConnId) -> bool {
        self.conns.contains_key(&conn)
    }

    pub(crate) fn take_deserted(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.deserted)
    }

    pub(crate) fn take_told(&mut self) -> Vec<Told> {
        std::mem::take(&mut self.told)
    }

    /// As `Lane::read_avoiding`.
    pub(crate) fn read(
        &mut self,
        lane: usize,
        token: u64,
        segment: u64,
        (pages, avoid): (&[u32], &[DonorIndex]),
        net: &mut Network,
        dice: &mut Dice,
    ) {
        if self.fenced {
            return self.told.push(Told::Failed { token, why: Why::Fenced });
        }
        match self.map.whereabouts(segment) {
            Whereabouts::Nowhere => {
                let values = vec![0; pages.len()];
                self.told.push(Told::Shown { token, from: 0, values, giver: None });
            }
            Whereabouts::Lost(_) => {
                self.told.push(Told::Failed { token, why: Why::Lost { segment } });
            }
            Whereabouts::Held(group) => {
                let pages = pages.iter().copied();
                let requests = &mut self.lanes[lane].requests;
                let donor = requests.read(token, (segment, &group), pages, avoid, net.now);
                self.flush(lane, donor.0 as usize, net, dice);
                self.connect_where_needed(lane, net, dice);
            }
        }
    }

    /// As `Space::free_segment`, for a segment that is held.
    pub(crate) fn free(&mut self, token: u64, segment: u64, net: &mut Network, dice: &mut Dice) {
        let Whereabouts::Held(group) = self.map.whereabouts(segment) else { return };
        let left = group.members().len();
        self.frees.insert(token, Free { segment, group, left, failed: None });
        for member in group.members() {
            let (place, only) = (member.place, left == 1);
            let job = Job::Free { token, segment, place, only };
            self.control(place.donor.0 as usize, job, net, dice);
        }
    }

    fn freed(&mut self, token: u64, failed: Option<Why>) {
        let Some(free) = self.frees.get_mut(&token) else { return };
        free.left -= 1;
        free.failed = free.failed.or(failed);
        let Free { segment, group, left, failed } = *free;
        if left == 0 {
            self.frees.remove(&token);
            if failed.is_none() {
                self.map.freed(segment, &group);
            }
            self.told.push(Told::Control { token, outcome: failed.map_or(Ok(None), Err) });
        }
    }

    /// As `Space::discard_in`.
    pub(crate) fn discard(
        &mut self,
        token: u64,
        segment: u64,
        (first, count): (u32, u32),
        net: &mut Network,
        dice: &mut Dice,
    ) {
        let (done, brought) = (Vec::new(), Generation::default());
        let discard = Discard { segment, first, count, done, brought, failed: None };
        self.discards.insert(token, discard);
        self.push_discard(token, net, dice);
    }

    fn push_discard(&mut self, token: u64, net: &mut Network, dice: &mut Dice) {
        let Discard { segment, failed, .. } = self.discards[&token];
        let outcome = match (failed, self.map.whereabouts(segment)) {
            (Some(why), _) => Err(why),
            (None, Whereabouts::Nowhere) => Ok(None),
            (None, Whereabouts::Lost(_)) => Err(Why::Lost { segment }),
            (None, Whereabouts::Held(group)) => {
                let group = self.map.touch(segment).unwrap_or(group);
                let Some(Discard { done, brought, .. }) = self.discards.get_mut(&token) else {
                    return;
                };
                if std::mem::replace(brought, group.generation) != group.generation {
                    done.clear();
                }
                let next = group.members().iter().find(|member| !done.contains(&member.place));
                match next.map(|member| member.place) {
                    None => Ok(Some(group.generation)),
                    Some(place) => {
                        let only = group.members().len() == 1;
                        let generation = group.generation;
                        let job = Job::Discard { token, place, only, generation };
                        return self.control(place.donor.0 as usize, job, net, dice);
                    }
                }
            }
        };
        self.discards.remove(&token);
        self.told.push(Told::Control { token, outcome });
    }

    /// What has become of a discard at one member.
    fn discarded(
        &mut self,
        (token, place, only): (u64, Place, bool),
        outcome: Result<(), Why>,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        let Some(discard) = self.discards.get_mut(&token) else { return };
        let segment = discard.segment;
        match outcome {
            Ok(()) => discard.done.push(place),
            Err(Why::Lost { .. }) => self.map.gone(segment, place),
            Err(why) if only || why == Why::Fenced => discard.failed = Some(why),
            Err(why) if !self.map.desert(segment, place) => discard.failed = Some(why),
            Err(_) => self.deserted.push(segment),
        }
        self.push_discard(token, net, dice);
    }

    /// As `Space::tend`: one step for one segment at a time.
    pub(crate) fn tend(&mut self, net: &mut Network, dice: &mut Dice) {
        if self.tending.is_some() || self.fenced {
            return;
        }
        let segments = self.map.segments_to_tend(4);
        if !segments.is_empty() {
            let segment = segments[dice.below(segments.len() as u64) as usize];
            self.tend_segment(segment, Vec::new(), net, dice);
        }
    }

    fn tend_segment(
        &mut self,
        segment: u64,
        tried: Vec<DonorIndex>,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        let step = self.map.next_step(segment, &tried);
        // A copy too many may have been let go for others that only seem to be there.
        self.deserted.push(segment);
        self.tending = Some((segment, tried));
        match step {
            Step::Nothing | Step::Wait => self.tending = None,
            Step::Join(donor) => {
                self.control(donor.0 as usize, Job::Join { segment }, net, dice);
            }
            Step::Fill { to, from } => {
                let job = Job::Fill { segment, to, from, first: 0 };
                self.control(to.donor.0 as usize, job, net, dice);
            }
            Step::Leave { from, kept } => {
                let job = Job::Leave { segment, from, kept };
                self.control(kept.donor.0 as usize, job, net, dice);
            }
        }
    }

    /// As `Space::suspect`.
    pub(crate) fn suspect(&mut self, segment: u64, page: u32) {
        self.suspects.push((segment, page / SCRUB_PAGES * SCRUB_PAGES));
    }

    /// As `Space::scrub`, one question at a time. Says what came of a run that is over, and when a round
    /// is over.
    pub(crate) fn scrub(
        &mut self,
        known: Known<'_>,
        net: &mut Network,
        dice: &mut Dice,
    ) -> Option<Scrubbed> {
        if self.fenced {
            return None;
        }
        if self.inspection.is_none() {
            let suspect = self.suspects.pop();
            let suspect = suspect
                .and_then(|(segment, first)| self.map.run_to_compare(segment, first, SCRUB_PAGES));
            let run = suspect.or_else(|| self.cursor.next(&self.map, SCRUB_PAGES));
            let Some(run) = run else { return Some(Scrubbed::Round) };
            self.inspection = Some((Inspection::new(run, SEGMENT_PAGES, sum_of(0)), false));
        }
        let (inspection, is_asking) = self.inspection.as_mut()?;
        if *is_asking {
            return None;
        }
        let segment = inspection.segment();
        let (donor, job) = match inspection.next(known) {
            Ask::Verify { place, first, count } => {
                (place.donor, Job::Verify { segment, place, first, count })
            }
            Ask::Repair { to, from, first, count } => {
                (to.donor, Job::Repair { segment, to, from, first, count })
            }
            Ask::Over(report) => {
                let report = self.map.uphold(inspection, report);
                self.inspection = None;
                if let Some(place) = report.wrong {
                    self.deserted.push(segment);
                    let _ = self.map.desert(segment, place);
                }
                return Some(Scrubbed::Run(segment, report));
            }
        };
        *is_asking = true;
        self.control(donor.0 as usize, job, net, dice);
        None
    }

    /// The donor has answered, in whatever way.
    fn scrub_answered(&mut self, tell: impl FnOnce(&mut Inspection)) {
        if let Some((inspection, is_asking)) = &mut self.inspection {
            *is_asking = false;
            tell(inspection);
        }
    }

    /// As `Lane::write`.
    pub(crate) fn write(
        &mut self,
        lane: usize,
        token: u64,
        segment: u64,
        contents: impl Iterator<Item = (u32, Value)>,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        let (pages, values) = contents.unzip();
        let write = Write { token, segment, pages, values, since: net.now, writing: None };
        self.lanes[lane].writes.push_back(write);
        self.push_writes(lane, net, dice);
    }

    pub(crate) fn control(&mut self, donor: usize, job: Job, net: &mut Network, dice: &mut Dice) {
        self.controls[donor].jobs.push_back((job, net.now));
        self.push_control(donor, net, dice);
    }

    /// As `Space::renew`.
    pub(crate) fn renew(&mut self, net: &mut Network, dice: &mut Dice) {
        for donor in 0..self.controls.len() {
            self.control(donor, Job::Renew, net, dice);
        }
    }

    /// What a thread does that waits in `Lane::write`.
    fn push_writes(&mut self, lane: usize, net: &mut Network, dice: &mut Dice) {
        while let Some(write) = self.lanes[lane].writes.front() {
            let (segment, token) = (write.segment, write.token);
            let mut why = None;
            if self.fenced {
                why = Some(Why::Fenced);
            } else if write.writing.is_none() {
                match self.map.begin(segment) {
                    Take::Held(group) => {
                        let Lane { requests, writes, .. } = &mut self.lanes[lane];
                        let writing = requests.write(token, segment, group);
                        writes[0].writing = Some((writing, net.now));
                    }
                    Take::Ask(donor, generation) => {
                        let job = Job::Take { segment, generation };
                        return self.control(donor.0 as usize, job, net, dice);
                    }
                    Take::Wait => return,
                    Take::Lost(_) => why = Some(Why::Lost { segment }),
                    Take::NoRoom => why = Some(Why::NoRoom),
                }
            }
            let Some((writing, known_at)) = self.lanes[lane].writes[0].writing else {
                let why = why.expect("it has no group");
                self.told.push(Told::Failed { token, why });
                self.lanes[lane].writes.pop_front();
                continue;
            };
            if why.is_none() {
                why = match self.send_write(lane, &writing, known_at, net, dice) {
                    Ok(true) => return,
                    Ok(false) => None,
                    Err(why) => Some(why),
                };
            }
            let Lane { requests, writes, .. } = &mut self.lanes[lane];
            writes.pop_front();
            match why {
                Some(why) if !requests.is_sent(&writing) => {
                    requests.forget(&writing);
                    self.told.push(Told::Failed { token, why });
                }
                _ => {
                    for place in requests.unsent(&writing) {
                        requests.give_up(&writing, place, Cause::Unreachable);
                    }
                    let mut groups = Noted { map: &mut self.map, deserted: &mut self.deserted };
                    requests.sent(&writing, &mut groups, net.now);
                }
            }
        }
    }

    /// As `Lane::send_write`, without waiting: true when it is to be called again.
    fn send_write(
        &mut self,
        lane: usize,
        writing: &Writing,
        known_at: Duration,
        net: &mut Network,
        dice: &mut Dice,
    ) -> Result<bool, Why> {
        let mut waits = false;
        for place in self.lanes[lane].requests.unsent(writing) {
            let donor = place.donor.0 as usize;
            self.flush(lane, donor, net, dice);
            match self.lanes[lane].requests.flights.link_for(place, known_at) {
                Link::Good => {
                    if self.submit_write(lane, writing, place, net, dice) {
                        continue;
                    }
                }
                Link::NotOpen => {
                    if self.lanes[lane].requests.flights.begin_connect(place.donor, net.now) {
                        self.connect(lane, donor, net, dice);
                    }
                }
                Link::Stale => self.broke(lane, donor, net, dice),
                Link::Lost => {
                    let segment = self.lanes[lane].writes[0].segment;
                    self.map.gone(segment, place);
                    self.lanes[lane].requests.give_up(writing, place, Cause::Lost);
                    continue;
                }
            }
            let Lane { requests, writes, .. } = &mut self.lanes[lane];
            let is_down = requests.flights.is_down(place.donor, net.now, FAILOVER)
                || known_at + FAILOVER <= net.now;
            if is_down && requests.is_sent(writing) {
                requests.give_up(writing, place, Cause::Unreachable);
            } else if writes[0].since + PATIENCE <= net.now {
                return Err(Why::Unreachable);
            } else {
                waits = true;
            }
        }
        Ok(waits)
    }

    fn submit_write(
        &mut self,
        lane: usize,
        writing: &Writing,
        place: Place,
        net: &mut Network,
        dice: &mut Dice,
    ) -> bool {
        let Lane { requests, links, writes } = &mut self.lanes[lane];
        let write = &writes[0];
        let asked = Asked::Write {
            extent: place.extent,
            generation: writing.group.generation,
            pages: write.pages.clone(),
            sums: write.values.iter().map(|value| sum_of(*value)).collect(),
        };
        let link = &mut links[place.donor.0 as usize];
        let is_next = requests.flights.next_to_send(place.donor).is_none();
        let (Some(conn), true, true) =
            (link.conn, is_next, link.window.has_room(&asked.as_request()))
        else {
            return false;
        };
        let slot = requests.sending(writing, place, write.pages.len(), net.now);
        let id = link.window.admit(slot.0.into(), &asked.as_request());
        let data = write.values.clone();
        net.send_to_donor(conn, ToDonor::Request { id, asked, data }, dice);
        true
    }

    fn flush(&mut self, lane: usize, donor: usize, net: &mut Network, dice: &mut Dice) {
        let Lane { requests, links, .. } = &mut self.lanes[lane];
        let flights = &mut requests.flights;
        let link = &mut links[donor];
        let Some(conn) = link.conn else { return };
        while let Some(next) = flights.next_to_send(index_of(donor)) {
            let asked = Asked::Read { extent: next.place.extent, pages: next.pages.to_vec() };
            if !link.window.has_room(&asked.as_request()) {
                return;
            }
            let id = link.window.admit(next.slot.0.into(), &asked.as_request());
            net.send_to_donor(conn, ToDonor::Request { id, asked, data: Vec::new() }, dice);
            flights.sent(index_of(donor), net.now);
        }
        if flights.is_stale(index_of(donor)) {
            self.broke(lane, donor, net, dice);
        }
    }

    fn flush_all(&mut self, lane: usize, net: &mut Network, dice: &mut Dice) {
        for donor in 0..self.controls.len() {
            self.flush(lane, donor, net, dice);
        }
    }

    fn connect_where_needed(&mut self, lane: usize, net: &mut Network, dice: &mut Dice) {
        for donor in self.lanes[lane].requests.flights.to_connect(net.now) {
            self.connect(lane, donor.0 as usize, net, dice);
        }
    }

    fn connect(&mut self, lane: usize, donor: usize, net: &mut Network, dice: &mut Dice) {
        let link = &mut self.lanes[lane].links[donor];
        let conn = net.connect(donor);
        link.conn = Some(conn);
        link.window = Window::new(WINDOW);
        link.open = false;
        link.begun = net.now;
        self.conns.insert(conn, End::Lane(lane, donor));
        net.send_to_donor(conn, ToDonor::Hello { epoch: self.epoch, lane: link.lane }, dice);
    }

    fn broke(&mut self, lane: usize, donor: usize, net: &mut Network, dice: &mut Dice) {
        if let Some(conn) = self.lanes[lane].links[donor].conn.take() {
            self.conns.remove(&conn);
            net.sever(conn, dice);
        }
        let requests = &mut self.lanes[lane].requests;
        requests.flights.broke(index_of(donor), net.now);
        if self.fenced {
            requests.flights.fenced();
        }
        if self.copies > 1 {
            let mut groups = Noted { map: &mut self.map, deserted: &mut self.deserted };
            requests.fail_over(index_of(donor), &mut groups, net.now);
            self.flush_all(lane, net, dice);
        }
        self.connect_where_needed(lane, net, dice);
    }

    /// What is due by the clock.
    pub(crate) fn tick(&mut self, net: &mut Network, dice: &mut Dice) {
        for lane in 0..self.lanes.len() {
            for donor in self.lanes[lane].requests.flights.tick(net.now) {
                self.broke(lane, donor.0 as usize, net, dice);
            }
            if self.copies > 1 {
                for donor in self.lanes[lane].requests.flights.silent(net.now, FAILOVER) {
                    self.broke(lane, donor.0 as usize, net, dice);
                }
                let mut groups = Noted { map: &mut self.map, deserted: &mut self.deserted };
                self.lanes[lane].requests.hedge(&mut groups, net.now);
                self.flush_all(lane, net, dice);
            }
            self.connect_where_needed(lane, net, dice);
            self.push_writes(lane, net, dice);
            self.report(lane, net, dice);
        }
        for donor in 0..self.controls.len() {
            let control = &self.controls[donor];
            if control.conn.is_some()
                && !control.jobs.is_empty()
                && control.since + STALL <= net.now
            {
                self.control_broke(donor, net, dice);
            }
            self.push_control(donor, net, dice);
        }
    }

    pub(crate) fn ended(&mut self, conn: ConnId, net: &mut Network, dice: &mut Dice) {
        match self.conns.get(&conn) {
            Some(End::Lane(lane, donor)) => {
                let (lane, donor) = (*lane, *donor);
                self.broke(lane, donor, net, dice);
                self.report(lane, net, dice);
            }
            Some(End::Control(donor)) => self.control_broke(*donor, net, dice),
            None => {}
        }
    }

    pub(crate) fn receive(
        &mut self,
        conn: ConnId,
        message: ToBorrower,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        match self.conns.get(&conn) {
            Some(End::Lane(lane, donor)) => {
                let (lane, donor) = (*lane, *donor);
                if !self.lane_receives(lane, donor, message, net) {
                    self.broke(lane, donor, net, dice);
                }
                self.flush(lane, donor, net, dice);
                self.push_writes(lane, net, dice);
                self.report(lane, net, dice);
            }
            Some(End::Control(donor)) => self.control_receives(*donor, message, net, dice),
            None => {}
        }
    }

    /// As `Lane::advance`. False when the connection is to be given up.
    fn lane_receives(
        &mut self,
        lane: usize,
        donor: usize,
        message: ToBorrower,
        net: &Network,
    ) -> bool {
        let Lane { requests, links, .. } = &mut self.lanes[lane];
        let link = &mut links[donor];
        match message {
            ToBorrower::Welcome(Ok((boot, load))) if !link.open => {
                link.open = true;
                link.boot = boot;
                link.wants = (load.recalled > 0, load.draining);
                let heard = self.map.heard(index_of(donor), boot, load, link.begun, net.now);
                if heard {
                    requests.flights.opened(index_of(donor), boot);
                }
                heard
            }
            ToBorrower::Welcome(refused) => {
                if let Err(Refusal::StaleEpoch(_)) = refused {
                    self.fenced = true;
                }
                false
            }
            ToBorrower::Answer { .. } if !link.open => false,
            ToBorrower::Answer { id, answered, data, load } => {
                let Ok(tag) = link.window.check(id, &answered.as_answer()) else { return false };
                link.window.settle();
                let slot = Slot(tag as u32);
                match answered {
                    Answered::Pages(sums) => {
                        for (value, sum) in data.iter().zip(&sums) {
                            let is_sound = sum_of(*value) == *sum;
                            assert!(is_sound || value & DECAYED != 0, "a page with a wrong sum");
                        }
                        // In two pieces, as a socket would bring them.
                        let (first, second) = data.split_at(data.len() / 2);
                        for (at, piece) in [(0, first), (first.len(), second)] {
                            if !piece.is_empty() {
                                let new = requests.pages(slot, at, piece.len(), net.now);
                                let shown = new.map(|new| Told::Shown {
                                    token: new.token,
                                    from: new.from,
                                    values: piece[new.skip..].to_vec(),
                                    giver: Some(index_of(donor)),
                                });
                                self.told.extend(shown);
                            }
                        }
                    }
                    Answered::Done => {
                        let mut groups = Noted { map: &mut self.map, deserted: &mut self.deserted };
                        requests.written(slot, &mut groups, net.now);
                    }
                    Answered::Refused(refusal) => requests.flights.refused(slot, refusal),
                    Answered::Allocated(_) | Answered::Held(_) | Answered::Verified(_) => {
                        panic!("never asked for by a lane")
                    }
                }
                let wants = (load.recalled > 0, load.draining);
                if std::mem::replace(&mut link.wants, wants) == wants {
                    return true;
                }
                self.map.heard(index_of(donor), link.boot, load, link.begun, net.now)
            }
        }
    }

    fn report(&mut self, lane: usize, net: &mut Network, dice: &mut Dice) {
        let Lane { requests, .. } = &mut self.lanes[lane];
        let mut groups = Noted { map: &mut self.map, deserted: &mut self.deserted };
        requests.settle(&mut groups, net.now);
        while let Some(end) = requests.next_end() {
            self.told.push(match end {
                Ended::Written { token, generation } => Told::Written { token, generation },
                Ended::Failed { token, segment, cause, .. } => {
                    let why = match cause {
                        Cause::Lost => Why::Lost { segment },
                        Cause::Unreachable => Why::Unreachable,
                        Cause::Interrupted => Why::Interrupted,
                        Cause::Fenced => {
                            self.fenced = true;
                            Why::Fenced
                        }
                        Cause::Refused(refusal) => {
                            panic!("a lane's request was refused: {refusal}")
                        }
                    };
                    Told::Failed { token, why }
                }
            });
        }
        // Settling may have asked others.
        self.flush_all(lane, net, dice);
        self.connect_where_needed(lane, net, dice);
    }

    fn control_broke(&mut self, donor: usize, net: &mut Network, dice: &mut Dice) {
        let control = &mut self.controls[donor];
        if let Some(conn) = control.conn.take() {
            self.conns.remove(&conn);
            net.sever(conn, dice);
        }
        control.stage = Stage::Closed;
        control.asked = false;
        self.push_control(donor, net, dice);
    }

    /// As `Link::call`, driven by events: connects, and asks what is asked next.
    fn push_control(&mut self, donor: usize, net: &mut Network, dice: &mut Dice) {
        while let Some((job, since)) = self.controls[donor].jobs.front().copied() {
            let persistent =
                matches!(job, Job::Free { only: true, .. } | Job::Discard { only: true, .. });
            let control = &mut self.controls[donor];
            if self.fenced {
                self.finish(donor, job, Err(Why::Fenced), net, dice);
                continue;
            }
            match control.stage {
                Stage::Closed => {
                    let spent = match persistent {
                        true => since + PATIENCE <= net.now,
                        false => control.fresh > 0,
                    };
                    if spent {
                        self.map.silent(index_of(donor));
                        self.finish(donor, job, Err(Why::Unreachable), net, dice);
                        continue;
                    }
                    control.fresh += 1;
                    let conn = net.connect(donor);
                    control.conn = Some(conn);
                    control.window = Window::new(WINDOW);
                    control.stage = Stage::Opening;
                    control.since = net.now;
                    control.begun = net.now;
                    self.conns.insert(conn, End::Control(donor));
                    net.send_to_donor(
                        conn,
                        ToDonor::Hello { epoch: self.epoch, lane: control.lane },
                        dice,
                    );
                    return;
                }
                Stage::Opening | Stage::Fencing | Stage::Listing(_) => return,
                Stage::Ready if control.asked => return,
                Stage::Ready => {
                    let expected = match job {
                        Job::Discard { token, place, .. } => {
                            Some((self.discards[&token].segment, place.boot))
                        }
                        Job::Free { segment, place, .. }
                        | Job::Fill { segment, to: place, .. }
                        | Job::Confirm { segment, to: place, .. }
                        | Job::Leave { segment, kept: place, .. }
                        | Job::Verify { segment, place, .. }
                        | Job::Repair { segment, to: place, .. } => Some((segment, place.boot)),
                        _ => None,
                    };
                    if let Some((segment, _)) = expected.filter(|(_, boot)| *boot != control.boot) {
                        self.finish(donor, job, Err(Why::Lost { segment }), net, dice);
                        continue;
                    }
                    let asked = match job {
                        Job::Renew => Asked::Renew,
                        Job::Leave { kept, .. } => {
                            Asked::Read { extent: kept.extent, pages: vec![0] }
                        }
                        Job::Take { segment, generation } => {
                            Asked::Allocate { segment, order: SEGMENT_ORDER, generation }
                        }
                        Job::Join { segment } | Job::FreeStray { segment, extent: None } => {
                            let generation = Generation::FILLING;
                            Asked::Allocate { segment, order: SEGMENT_ORDER, generation }
                        }
                        Job::Fill { to, from, first, .. } => {
                            let count = FILL_PAGES.min(SEGMENT_PAGES as u32 - first);
                            let from = (from.donor.0 as usize, from.boot, from.extent);
                            Asked::Fill { extent: to.extent, first, count, from }
                        }
                        Job::Confirm { to, generation, .. } => {
                            Asked::Confirm { extent: to.extent, generation }
                        }
                        Job::Verify { place, first, count, .. } => {
                            Asked::Verify { extent: place.extent, first, count }
                        }
                        Job::Repair { to, from, first, count, .. } => {
                            let from = (from.donor.0 as usize, from.boot, from.extent);
                            Asked::Repair { extent: to.extent, first, count, from }
                        }
                        Job::FreeStray { extent: Some(extent), .. } => Asked::Free { extent },
                        Job::Free { place, .. } => Asked::Free { extent: place.extent },
                        Job::Discard { token, place, generation, .. } => {
                            let Discard { first, count, .. } = self.discards[&token];
                            Asked::Discard { extent: place.extent, generation, first, count }
                        }
                        Job::FreeAll { .. } => Asked::FreeAll,
                    };
                    // Perhaps freed by an earlier job.
                    if let Job::FreeStray { segment, extent: None } = job
                        && !self.map.strays_of(index_of(donor)).contains(&segment)
                    {
                        self.finish(donor, job, Ok(()), net, dice);
                        continue;
                    }
                    self.ask(donor, asked, net, dice);
                    return;
                }
            }
        }
    }

    fn ask(&mut self, donor: usize, asked: Asked, net: &mut Network, dice: &mut Dice) {
        let control = &mut self.controls[donor];
        let Some(conn) = control.conn else { return };
        let id = control.window.admit(0, &asked.as_request());
        control.asked = true;
        control.since = net.now;
        net.send_to_donor(conn, ToDonor::Request { id, asked, data: Vec::new() }, dice);
    }

    fn control_receives(
        &mut self,
        donor: usize,
        message: ToBorrower,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        let control = &mut self.controls[donor];
        match (message, &mut control.stage) {
            (ToBorrower::Welcome(Ok((boot, _))), stage @ Stage::Opening) => {
                control.boot = boot;
                *stage = Stage::Fencing;
                self.ask(donor, Asked::Fence, net, dice);
                return;
            }
            (ToBorrower::Welcome(Err(Refusal::StaleEpoch(_))), _) => self.fenced = true,
            (ToBorrower::Answer { id, answered, load, .. }, stage)
                if control.window.check(id, &answered.as_answer()).is_ok() =>
            {
                control.window.settle();
                control.asked = false;
                if !self.map.heard(index_of(donor), control.boot, load, control.begun, net.now) {
                    self.control_broke(donor, net, dice);
                    return;
                }
                if let Answered::Refused(Refusal::StaleEpoch(_)) = answered {
                    self.fenced = true;
                    self.control_broke(donor, net, dice);
                    return;
                }
                match (stage, answered) {
                    (stage @ Stage::Fencing, Answered::Done)
                        if self.adopted && !self.map.is_listed(index_of(donor), control.boot) =>
                    {
                        *stage = Stage::Listing(Vec::new());
                        self.ask(donor, Asked::List { from: ExtentId(0) }, net, dice);
                    }
                    (stage @ Stage::Fencing, Answered::Done) => {
                        *stage = Stage::Ready;
                    }
                    (stage @ Stage::Listing(_), Answered::Held(lines)) => {
                        let Stage::Listing(all) = stage else { return };
                        all.extend_from_slice(&lines);
                        if lines.len() == MAX_HELD {
                            let from = ExtentId(lines[MAX_HELD - 1].extent.0 + 1);
                            self.ask(donor, Asked::List { from }, net, dice);
                            return;
                        }
                        let all = std::mem::take(all);
                        *stage = Stage::Ready;
                        self.map.listed(index_of(donor), control.boot, &all);
                    }
                    (Stage::Ready, answered) => {
                        self.job_answered(donor, answered, net, dice);
                    }
                    (_, answered) => panic!("odd answer to an introduction: {answered:?}"),
                }
                self.push_control(donor, net, dice);
                return;
            }
            _ => {}
        }
        self.control_broke(donor, net, dice);
    }

    fn job_answered(
        &mut self,
        donor: usize,
        answered: Answered,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        let Some((job, since)) = self.controls[donor].jobs.front().copied() else { return };
        let outcome = match (job, answered) {
            (Job::Join { segment }, Answered::Allocated(extent)) => {
                let boot = self.controls[donor].boot;
                let place = Place { donor: index_of(donor), boot, extent };
                if !self.map.join(segment, place) {
                    self.tending = None;
                }
                Ok(())
            }
            (Job::Join { .. }, Answered::Refused(Refusal::Full)) => Err(Why::NoRoom),
            (Job::Fill { segment, to, from, first }, Answered::Done) => {
                let first = first + FILL_PAGES;
                if first < SEGMENT_PAGES as u32 {
                    self.controls[donor].jobs[0] =
                        (Job::Fill { segment, to, from, first }, net.now);
                } else if let Some(generation) = self.generation_with(segment, to) {
                    self.controls[donor].jobs[0] =
                        (Job::Confirm { segment, to, generation }, net.now);
                } else {
                    self.tending = None;
                    return self.finish(donor, job, Ok(()), net, dice);
                }
                return;
            }
            (Job::Fill { from, .. }, Answered::Refused(Refusal::NoSource)) => {
                self.map.silent(from.donor);
                Err(Why::Unreachable)
            }
            (
                Job::Fill { segment, to, .. },
                Answered::Refused(Refusal::NotFilling | Refusal::NoSuchExtent),
            ) => {
                let _ = self.map.desert(segment, to);
                Err(Why::Lost { segment })
            }
            (Job::Confirm { segment, to, generation }, Answered::Done) => {
                if self.map.filled(segment, to, generation) {
                    self.copies_made += 1;
                } else if let Some(generation) = self.generation_with(segment, to) {
                    self.controls[donor].jobs[0] =
                        (Job::Confirm { segment, to, generation }, net.now);
                    return;
                }
                Ok(())
            }
            (Job::Confirm { segment, to, .. }, Answered::Refused(Refusal::NoSuchExtent)) => {
                let _ = self.map.desert(segment, to);
                Err(Why::Lost { segment })
            }
            (Job::Verify { place, .. }, Answered::Verified(states)) => {
                self.scrub_answered(|inspection| inspection.verified(place, &states));
                Ok(())
            }
            (Job::Repair { .. }, Answered::Done) => {
                self.scrub_answered(Inspection::mended);
                Ok(())
            }
            (
                Job::Verify { .. } | Job::Repair { .. },
                Answered::Refused(Refusal::NoSuchExtent | Refusal::NoSource),
            ) => Err(Why::Unreachable),
            (Job::Take { segment, .. }, Answered::Allocated(extent)) => {
                let boot = self.controls[donor].boot;
                let place = Place { donor: index_of(donor), boot, extent };
                match self.map.allocated(segment, place) {
                    Take::Ask(next, generation) => {
                        let job = Job::Take { segment, generation };
                        self.control(next.0 as usize, job, net, dice);
                    }
                    Take::NoRoom => self.no_room(segment),
                    Take::Held(_) | Take::Wait | Take::Lost(_) => {}
                }
                Ok(())
            }
            (Job::Take { .. }, Answered::Refused(Refusal::Full)) => Err(Why::NoRoom),
            (Job::FreeStray { segment, extent: None }, Answered::Allocated(extent)) => {
                let job = Job::FreeStray { segment, extent: Some(extent) };
                self.controls[donor].jobs[0] = (job, since);
                return;
            }
            (Job::FreeStray { extent: None, .. }, Answered::Refused(Refusal::Full)) => Ok(()),
            (Job::Leave { segment, kept, .. }, Answered::Refused(Refusal::NoSuchExtent)) => {
                self.map.gone(segment, kept);
                Ok(())
            }
            (Job::Leave { segment, from, .. }, Answered::Pages(_)) => {
                self.copies_left += u64::from(self.map.desert(segment, from));
                self.deserted.push(segment);
                Ok(())
            }
            (Job::Renew | Job::FreeAll { .. } | Job::Discard { .. }, Answered::Done) => Ok(()),
            (
                Job::Free { .. } | Job::FreeStray { .. },
                Answered::Done | Answered::Refused(Refusal::NoSuchExtent),
            ) => Ok(()),
            (Job::Discard { token, .. }, Answered::Refused(Refusal::NoSuchExtent)) => {
                Err(Why::Lost { segment: self.discards[&token].segment })
            }
            (job, answered) => panic!("odd answer to {job:?}: {answered:?}"),
        };
        self.finish(donor, job, outcome, net, dice);
    }

    /// The generation of a segment's group, if it has that member.
    fn generation_with(&self, segment: u64, place: Place) -> Option<Generation> {
        match self.map.whereabouts(segment) {
            Whereabouts::Held(group) if group.contains(place) => Some(group.generation),
            _ => None,
        }
    }

    fn finish(
        &mut self,
        donor: usize,
        job: Job,
        outcome: Result<(), Why>,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        let control = &mut self.controls[donor];
        control.jobs.pop_front();
        control.fresh = 0;
        match job {
            Job::Renew => {
                if outcome.is_ok() {
                    for segment in self.map.strays_of(index_of(donor)) {
                        let stray = Job::FreeStray { segment, extent: None };
                        self.controls[donor].jobs.push_back((stray, net.now));
                    }
                }
            }
            Job::Take { segment, .. } => {
                match outcome {
                    Ok(()) => {}
                    Err(Why::Fenced) => self.map.abandon(segment),
                    Err(why) => {
                        let declined = match why {
                            Why::NoRoom => Declined::Full,
                            _ => Declined::Silent,
                        };
                        match self.map.declined(segment, index_of(donor), declined) {
                            Take::Ask(next, generation) => {
                                let job = Job::Take { segment, generation };
                                self.control(next.0 as usize, job, net, dice);
                            }
                            Take::NoRoom => self.no_room(segment),
                            Take::Held(_) | Take::Wait | Take::Lost(_) => {}
                        }
                    }
                }
                for lane in 0..self.lanes.len() {
                    self.push_writes(lane, net, dice);
                }
            }
            Job::FreeStray { segment, .. } => {
                if outcome.is_ok() {
                    self.map.stray_freed(index_of(donor), segment);
                }
            }
            Job::Free { token, segment, place, only } => {
                let failed = match outcome {
                    Ok(()) | Err(Why::Lost { .. }) => None,
                    Err(why) if only || why == Why::Fenced => Some(why),
                    Err(_) => {
                        self.map.stray(place.donor, segment);
                        None
                    }
                };
                self.freed(token, failed);
            }
            Job::Discard { token, place, only, .. } => {
                self.discarded((token, place, only), outcome, net, dice);
            }
            Job::FreeAll { token } => {
                self.told.push(Told::Control { token, outcome: outcome.map(|()| None) });
            }
            Job::Join { segment } => {
                let Some((_, mut tried)) = self.tending.take() else { return };
                match outcome {
                    Ok(()) => {}
                    Err(Why::Fenced) => return,
                    Err(why) => {
                        let declined = match why {
                            Why::NoRoom => Declined::Full,
                            _ => Declined::Silent,
                        };
                        self.map.no_join(segment, index_of(donor), declined);
                        tried.push(index_of(donor));
                    }
                }
                self.tend_segment(segment, tried, net, dice);
            }
            Job::Verify { .. } | Job::Repair { .. } => {
                if outcome.is_err() {
                    self.scrub_answered(|inspection| inspection.failed(index_of(donor)));
                }
            }
            Job::Fill { segment, .. }
            | Job::Confirm { segment, .. }
            | Job::Leave { segment, .. } => {
                let Some((_, tried)) = self.tending.take() else { return };
                if outcome.is_ok() {
                    self.tend_segment(segment, tried, net, dice);
                }
            }
        }
    }

    /// The threads that waited for this extent are told that there is none.
    fn no_room(&mut self, segment: u64) {
        for lane in &mut self.lanes {
            if lane.writes.front().is_some_and(|write| write.segment == segment) {
                let token = lane.writes[0].token;
                lane.writes.pop_front();
                self.told.push(Told::Failed { token, why: Why::NoRoom });
            }
        }
    }
}
