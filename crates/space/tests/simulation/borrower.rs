//! A borrower in the simulation: the space's map and its lanes' flights, exactly those of the crate,
//! with simulated connections where `Space`, `Lane` and the control link have sockets.

use crate::dice::Dice;
use crate::network::{Answered, Asked, ConnId, Network, ToBorrower, ToDonor, Value, sum_of};
use hecaton_memory::{Epoch, ExtentId};
use hecaton_space::flights::{Cause, Failure, Flights, Limits, Link, Slot};
use hecaton_space::lookup::Whereabouts;
use hecaton_space::map::{Declined, DonorIndex, Map, Place, Take};
use hecaton_transport::protocol::{HeldExtent, MAX_HELD, Refusal};
use hecaton_transport::window::{Window, WindowLimits};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

pub(crate) const SEGMENT_ORDER: u8 = 3;
pub(crate) const SEGMENT_PAGES: u64 = 1 << SEGMENT_ORDER;
pub(crate) const SEGMENTS: u64 = 12;
const PATIENCE: Duration = Duration::from_millis(3000);
const STALL: Duration = Duration::from_millis(700);
const WINDOW: WindowLimits = WindowLimits { requests: 6, payload_bytes: 20 << 12 };

/// What the workload is told.
#[derive(Debug)]
pub(crate) enum Told {
    Shown {
        token: u64,
        from: usize,
        values: Vec<Value>,
    },
    Written {
        token: u64,
    },
    Failed {
        token: u64,
        why: Why,
    },
    /// A control job of the workload is done, or not.
    Control {
        token: u64,
        outcome: Result<(), Why>,
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

/// A control request that the workload, or the borrower itself, wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    Renew,
    Take { segment: u64 },
    FreeStray { segment: u64, extent: Option<ExtentId> },
    Free { token: u64, segment: u64, place: Place },
    Discard { token: u64, segment: u64, place: Place, first: u32, count: u32 },
    FreeAll { token: u64 },
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
    begun: Duration,
}

#[derive(Debug)]
struct Write {
    token: u64,
    segment: u64,
    pages: Vec<u32>,
    values: Vec<Value>,
    since: Duration,
    /// When the extent was first known.
    known_at: Option<Duration>,
}

struct Lane {
    flights: Flights,
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
        adopted: bool,
        dice: &mut Dice,
    ) -> Self {
        let mut map = Map::new(SEGMENTS, SEGMENT_PAGES);
        for donor in 0..donors {
            map.donor_named(&format!("donor-{donor}"), adopted);
        }
        let limits = Limits { patience: PATIENCE, stall: STALL };
        let mut link = |_| DonorLink {
            lane: dice.next(),
            conn: None,
            window: Window::new(WINDOW),
            open: false,
            begun: Duration::ZERO,
        };
        let lanes = (0..lanes).map(|_| Lane {
            flights: Flights::new(limits),
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
        let (told, conns) = (Vec::new(), BTreeMap::new());
        Borrower { map, fenced: false, epoch, adopted, lanes, controls, told, conns }
    }

    /// Whether every donor has told what it holds, and so is fenced.
    pub(crate) fn knows_all(&self) -> bool {
        self.map.unlisted().is_none()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lane| lane.flights.is_empty() && lane.writes.is_empty())
            && self.controls.iter().all(|control| control.jobs.is_empty())
    }

    pub(crate) fn owns(&self, conn: ConnId) -> bool {
        self.conns.contains_key(&conn)
    }

    pub(crate) fn take_told(&mut self) -> Vec<Told> {
        std::mem::take(&mut self.told)
    }

    /// As `Lane::read`.
    pub(crate) fn read(
        &mut self,
        lane: usize,
        token: u64,
        segment: u64,
        pages: &[u32],
        net: &mut Network,
        dice: &mut Dice,
    ) {
        if self.fenced {
            return self.told.push(Told::Failed { token, why: Why::Fenced });
        }
        match self.map.whereabouts(segment) {
            Whereabouts::Nowhere => {
                self.told.push(Told::Shown { token, from: 0, values: vec![0; pages.len()] });
            }
            Whereabouts::Lost(_) => {
                self.told.push(Told::Failed { token, why: Why::Lost { segment } });
            }
            Whereabouts::Held(place) => {
                let pages = pages.iter().copied();
                self.lanes[lane].flights.read(token, segment, place, pages, net.now);
                self.flush(lane, place.donor.0 as usize, net, dice);
                self.connect_where_needed(lane, net, dice);
            }
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
        let write = Write { token, segment, pages, values, since: net.now, known_at: None };
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
            let (segment, token, late) =
                (write.segment, write.token, write.since + PATIENCE <= net.now);
            let fail = |why| Told::Failed { token, why };
            let told = if self.fenced {
                fail(Why::Fenced)
            } else {
                match self.map.begin(segment) {
                    Take::Held(place) => match self.try_write(lane, place, net, dice) {
                        Some(why) => fail(why),
                        None if self.lanes[lane]
                            .writes
                            .front()
                            .is_none_or(|w| w.token != token) =>
                        {
                            continue;
                        }
                        None if late => fail(Why::Unreachable),
                        None => return,
                    },
                    Take::Ask(donor) => {
                        let job = Job::Take { segment };
                        self.control(donor.0 as usize, job, net, dice);
                        return;
                    }
                    Take::Wait => return,
                    Take::Lost(_) => fail(Why::Lost { segment }),
                    Take::NoRoom => fail(Why::NoRoom),
                }
            };
            self.told.push(told);
            self.lanes[lane].writes.pop_front();
        }
    }

    /// Sends the write that waits, if its donor's link is ready. Takes it from the queue if so.
    fn try_write(
        &mut self,
        lane: usize,
        place: Place,
        net: &mut Network,
        dice: &mut Dice,
    ) -> Option<Why> {
        let donor = place.donor.0 as usize;
        self.flush(lane, donor, net, dice);
        let Lane { flights, links, writes } = &mut self.lanes[lane];
        let write = writes.front_mut()?;
        let known_at = *write.known_at.get_or_insert(net.now);
        match flights.link_for(place, known_at) {
            Link::Good => {}
            Link::NotOpen => {
                if flights.begin_connect(place.donor, net.now) {
                    self.connect(lane, donor, net, dice);
                }
                return None;
            }
            Link::Stale => {
                self.broke(lane, donor, net, dice);
                return None;
            }
            Link::Lost => {
                let segment = write.segment;
                self.map.gone(segment, place);
                return Some(Why::Lost { segment });
            }
        }
        let asked = Asked::Write {
            extent: place.extent,
            pages: write.pages.clone(),
            sums: write.values.iter().map(|value| sum_of(*value)).collect(),
        };
        let link = &mut links[donor];
        let (Some(conn), true, true) = (
            link.conn,
            flights.next_to_send(place.donor).is_none(),
            link.window.has_room(&asked.as_request()),
        ) else {
            return None;
        };
        let write = writes.pop_front()?;
        let slot = flights.write(write.token, write.segment, place, write.pages.len(), net.now);
        let id = link.window.admit(slot.0.into(), &asked.as_request());
        net.send_to_donor(conn, ToDonor::Request { id, asked, data: write.values }, dice);
        None
    }

    fn flush(&mut self, lane: usize, donor: usize, net: &mut Network, dice: &mut Dice) {
        let Lane { flights, links, .. } = &mut self.lanes[lane];
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

    fn connect_where_needed(&mut self, lane: usize, net: &mut Network, dice: &mut Dice) {
        for donor in self.lanes[lane].flights.to_connect(net.now) {
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
        self.lanes[lane].flights.broke(index_of(donor), net.now);
        if self.fenced {
            self.lanes[lane].flights.fenced();
        }
        self.connect_where_needed(lane, net, dice);
    }

    /// What is due by the clock.
    pub(crate) fn tick(&mut self, net: &mut Network, dice: &mut Dice) {
        for lane in 0..self.lanes.len() {
            for donor in self.lanes[lane].flights.tick(net.now) {
                self.broke(lane, donor.0 as usize, net, dice);
            }
            self.connect_where_needed(lane, net, dice);
            self.push_writes(lane, net, dice);
            self.report(lane);
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
                self.report(lane);
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
                self.report(lane);
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
        let Lane { flights, links, .. } = &mut self.lanes[lane];
        let link = &mut links[donor];
        match message {
            ToBorrower::Welcome(Ok((boot, load))) if !link.open => {
                link.open = true;
                let heard = self.map.heard(index_of(donor), boot, load, link.begun, net.now);
                if heard {
                    flights.opened(index_of(donor), boot);
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
            ToBorrower::Answer { id, answered, data, .. } => {
                let Ok(tag) = link.window.check(id, &answered.as_answer()) else { return false };
                link.window.settle();
                let slot = Slot(tag as u32);
                match answered {
                    Answered::Pages(sums) => {
                        for (value, sum) in data.iter().zip(&sums) {
                            assert_eq!(sum_of(*value), *sum, "a page with a wrong sum");
                        }
                        // In two pieces, as a socket would bring them.
                        let (first, second) = data.split_at(data.len() / 2);
                        for (at, piece) in [(0, first), (first.len(), second)] {
                            if !piece.is_empty() {
                                let (token, from) = flights.pages(slot, at, piece.len(), net.now);
                                self.told.push(Told::Shown { token, from, values: piece.to_vec() });
                            }
                        }
                    }
                    Answered::Done => {
                        self.told.push(Told::Written { token: flights.written(slot) });
                    }
                    Answered::Refused(refusal) => flights.refused(slot, refusal),
                    Answered::Allocated(_) | Answered::Held(_) => {
                        panic!("never asked for by a lane")
                    }
                }
                true
            }
        }
    }

    fn report(&mut self, lane: usize) {
        while let Some(failure) = self.lanes[lane].flights.next_failure() {
            let Failure { token, segment, place, cause, .. } = failure;
            let why = match cause {
                Cause::Lost => {
                    self.map.gone(segment, place);
                    Why::Lost { segment }
                }
                Cause::Unreachable => Why::Unreachable,
                Cause::Interrupted => Why::Interrupted,
                Cause::Fenced => {
                    self.fenced = true;
                    Why::Fenced
                }
                Cause::Refused(refusal) => panic!("a lane's request was refused: {refusal}"),
            };
            self.told.push(Told::Failed { token, why });
        }
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
            let persistent = matches!(job, Job::Free { .. } | Job::Discard { .. });
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
                        Job::Free { segment, place, .. } | Job::Discard { segment, place, .. } => {
                            Some((segment, place.boot))
                        }
                        _ => None,
                    };
                    if let Some((segment, _)) = expected.filter(|(_, boot)| *boot != control.boot) {
                        self.finish(donor, job, Err(Why::Lost { segment }), net, dice);
                        continue;
                    }
                    let asked = match job {
                        Job::Renew => Asked::Renew,
                        Job::Take { segment } | Job::FreeStray { segment, extent: None } => {
                            Asked::Allocate { segment, order: SEGMENT_ORDER }
                        }
                        Job::FreeStray { extent: Some(extent), .. } => Asked::Free { extent },
                        Job::Free { place, .. } => Asked::Free { extent: place.extent },
                        Job::Discard { place, first, count, .. } => {
                            Asked::Discard { extent: place.extent, first, count }
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
            (Job::Take { segment }, Answered::Allocated(extent)) => {
                let boot = self.controls[donor].boot;
                let place = Place { donor: index_of(donor), boot, extent };
                match self.map.allocated(segment, place) {
                    Take::Ask(next) => {
                        self.control(next.0 as usize, Job::Take { segment }, net, dice);
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
            (Job::Renew | Job::FreeAll { .. } | Job::Discard { .. }, Answered::Done) => Ok(()),
            (
                Job::Free { .. } | Job::FreeStray { .. },
                Answered::Done | Answered::Refused(Refusal::NoSuchExtent),
            ) => Ok(()),
            (Job::Discard { segment, place, .. }, Answered::Refused(Refusal::NoSuchExtent)) => {
                self.map.gone(segment, place);
                Err(Why::Lost { segment })
            }
            (job, answered) => panic!("odd answer to {job:?}: {answered:?}"),
        };
        self.finish(donor, job, outcome, net, dice);
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
            Job::Take { segment } => {
                match outcome {
                    Ok(()) => {}
                    Err(Why::Fenced) => self.map.abandon(segment),
                    Err(why) => {
                        let declined = match why {
                            Why::NoRoom => Declined::Full,
                            _ => Declined::Silent,
                        };
                        match self.map.declined(segment, index_of(donor), declined) {
                            Take::Ask(next) => {
                                self.control(next.0 as usize, Job::Take { segment }, net, dice);
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
            Job::Free { token, segment, .. } => {
                let outcome = match outcome {
                    Err(Why::Lost { .. }) => Ok(()),
                    outcome => outcome,
                };
                if outcome.is_ok() {
                    self.map.freed(segment);
                }
                self.told.push(Told::Control { token, outcome });
            }
            Job::Discard { token, .. } | Job::FreeAll { token } => {
                self.told.push(Told::Control { token, outcome });
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
