//! A borrower in the simulation. The space's map and its lanes' requests are those of the crate.
//! Connections are simulated where `Space`, `Lane` and the control link have sockets.

use crate::dice::Dice;
use crate::network::{
    Answered, Asked, ConnId, DECAYED, Host, Network, ToBorrower, ToDonor, Value, sum_of,
};
use hecaton_memory::{Epoch, ExtentId, Generation, SpaceId};
use hecaton_space::code::Code;
use hecaton_space::flights::{Cause, Limits, Link, Slot};
use hecaton_space::group::{DonorIndex, Group, Place};
use hecaton_space::lookup::Whereabouts;
use hecaton_space::map::{Declined, Expected, Map, Shape, Take};
use hecaton_space::requests::{End as Ended, Groups, Recipient, Requests, Writing};
use hecaton_space::scrub::{Ask, Cursor, Inspection, Known, Report};
use hecaton_space::stripe::{Rebuild, Shards};
use hecaton_space::upkeep::Step;
use hecaton_space::{Coded, Site};
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

/// Message to the workload.
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
    /// It is part of a coded stripe, which has been told to warm.
    Coded,
    Lost {
        segment: u64,
    },
    Unreachable,
    Interrupted,
    Fenced,
    NoRoom,
}

/// Progress of the scrub.
#[derive(Debug)]
pub(crate) enum Scrubbed {
    Run(u64, Report),
    Round,
}

/// A control request that the workload, or the borrower itself, wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    Renew,
    Take {
        segment: u64,
        generation: Generation,
    },
    FreeStray {
        segment: u64,
        extent: Option<ExtentId>,
    },
    Free {
        token: u64,
        segment: u64,
        place: Place,
        only: bool,
    },
    Discard {
        token: u64,
        place: Place,
        only: bool,
        generation: Generation,
    },
    FreeAll {
        token: u64,
    },
    Join {
        segment: u64,
    },
    Fill {
        segment: u64,
        to: Place,
        from: Place,
        first: u32,
    },
    Confirm {
        segment: u64,
        to: Place,
        generation: Generation,
    },
    Leave {
        segment: u64,
        from: Place,
        kept: Place,
    },
    /// For the upkeep, or else the scrub.
    Verify {
        for_move: bool,
        segment: u64,
        place: Place,
        first: u32,
        count: u32,
    },
    Repair {
        for_move: bool,
        segment: u64,
        to: Place,
        from: Place,
        first: u32,
        count: u32,
    },
    ReadShard {
        shard: usize,
        segment: u64,
        place: Place,
    },
    WriteShard {
        shard: usize,
        segment: u64,
        place: Place,
    },
    /// A keeper is told its stripe's generation.
    Keep {
        stripe: u64,
        segment: u64,
        place: Place,
        generation: Generation,
    },
    Ask {
        stripe: u64,
        segment: u64,
        place: Place,
    },
}

/// A segment that is compared before a copy leaves: its group then, that copy, the next page to
/// compare, and the inspection in progress.
struct Comparing {
    segment: u64,
    group: Group,
    leaving: Place,
    next: u32,
    inspection: Option<(Inspection, bool)>,
}

/// The next question of an inspection, and the donor to ask; or the inspection's report.
fn job_of(segment: u64, ask: Ask, for_move: bool) -> Result<(DonorIndex, Job), Report> {
    match ask {
        Ask::Verify { place, first, count } => {
            Ok((place.donor, Job::Verify { for_move, segment, place, first, count }))
        }
        Ask::Repair { to, from, first, count } => {
            Ok((to.donor, Job::Repair { for_move, segment, to, from, first, count }))
        }
        Ask::Over(report) => Err(report),
    }
}

/// A stripe that is worked upon, as `Space::rebuild` and `Space::commit` do it.
#[derive(Default)]
struct Recoding {
    rebuild: Option<Rebuild>,
    shards: Vec<Option<Vec<Value>>>,
    /// Copies that were asked about, before the stripe is plain.
    asked: Vec<(u64, Place)>,
    /// Answers that are still to come.
    left: usize,
    failed: bool,
}

/// Use of a segment, as `lookup::Activity`.
#[derive(Clone, Copy, Default)]
struct Activity {
    writes: u32,
    used: Duration,
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

impl Control {
    fn new(dice: &mut Dice) -> Control {
        Control {
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
        }
    }
}

impl DonorLink {
    fn new(dice: &mut Dice) -> DonorLink {
        DonorLink {
            lane: dice.next(),
            conn: None,
            window: Window::new(WINDOW),
            open: false,
            boot: 0,
            begun: Duration::ZERO,
            wants: (false, false),
        }
    }
}

#[derive(Debug)]
struct Write {
    token: u64,
    segment: u64,
    pages: Vec<u32>,
    values: Vec<Value>,
    since: Duration,
    /// The write once it has a group, and when it got one.
    writing: Option<(Writing, Duration)>,
}

struct Lane {
    requests: Requests,
    links: Vec<DonorLink>,
    /// Writes that wait for an extent, a connection, or room: one at a time, as the call blocks.
    writes: VecDeque<Write>,
    /// Pages received for decodings, by decoding and shard.
    decodings: BTreeMap<(u64, usize), Vec<Value>>,
}

pub(crate) struct Borrower {
    pub(crate) map: Map,
    pub(crate) fenced: bool,
    space: SpaceId,
    /// Where it runs.
    host: Host,
    /// Number of each donor in the simulation, in the order in which the map came to know it.
    numbers: Vec<usize>,
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
    /// Comparison before a copy leaves.
    comparing: Option<Comparing>,
    pub(crate) repaired_for_moves: u64,
    pub(crate) copies_made: u64,
    pub(crate) copies_left: u64,
    cursor: Cursor,
    /// Inspection in progress, and whether a donor is asked for it.
    inspection: Option<(Inspection, bool)>,
    /// Segments and first pages of runs to compare out of turn.
    suspects: Vec<(u64, u32)>,
    /// Segments of which a member was given up.
    deserted: Vec<u64>,
    code: Option<Code>,
    activity: BTreeMap<u64, Activity>,
    recoding: Option<Recoding>,
    /// Decision that is not recorded yet: the borrower may die in between.
    to_record: Option<(u64, Option<Coded>)>,
    recorded: Vec<(u64, Option<Coded>)>,
    /// Segments with pages that could not be worked out.
    pub(crate) spoiled: Vec<u64>,
    pub(crate) coded: u64,
    pub(crate) thawed: u64,
    pub(crate) rebuilt: u64,
    pub(crate) decoded: u64,
}

/// Left by a predecessor: the stored segments, and the record of coded stripes.
pub(crate) type Left<'a> = (&'a BTreeMap<u64, Expected>, &'a BTreeMap<u64, Coded>);

/// How long a segment is left alone until it is cold.
const COLD_AFTER: Duration = Duration::from_millis(600);

/// Values as the code sees them.
pub(crate) fn bytes_of(values: &[Value]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn values_of(bytes: &[u8]) -> Vec<Value> {
    let value = |bytes: &[u8]| Value::from_le_bytes(bytes.try_into().expect("of eight bytes"));
    bytes.chunks(8).map(value).collect()
}

/// The map, with a note of who is given up.
struct Noted<'a> {
    map: &'a mut Map,
    deserted: &'a mut Vec<u64>,
    activity: &'a mut BTreeMap<u64, Activity>,
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

    fn shards(&mut self, segment: u64) -> Option<Shards> {
        self.map.shards(segment)
    }

    fn write_ends(&mut self, segment: u64) {
        write_ends(self.activity, segment);
    }
}

fn write_ends(activity: &mut BTreeMap<u64, Activity>, segment: u64) {
    let activity = activity.entry(segment).or_default();
    activity.writes = activity.writes.checked_sub(1).expect("it began");
}

#[derive(Clone, Copy)]
enum End {
    Lane(usize, usize),
    Control(usize),
}

/// Name of that donor among nodes.
pub(crate) fn donor_name(number: usize) -> String {
    format!("donor-{number}")
}

fn index_of(donor: usize) -> DonorIndex {
    DonorIndex(donor as u32)
}

impl Borrower {
    pub(crate) fn new(
        (space, host, epoch): (SpaceId, Host, Epoch),
        lanes: usize,
        donors: &[usize],
        (copies, code): (u8, Option<Code>),
        left: Option<Left<'_>>,
        dice: &mut Dice,
    ) -> Self {
        let shape = Shape { segments: SEGMENTS, segment_pages: SEGMENT_PAGES, copies, epoch, code };
        let adopted = left.is_some();
        let mut map = match left {
            Some((expected, coded)) => Map::adopting(shape, expected).with_coded(coded),
            None => Map::new(shape),
        };
        for number in donors {
            let name = donor_name(*number);
            map.donor_named(&name, &Site::unplaced(&name), adopted);
        }
        let limits = Limits { patience: PATIENCE, stall: STALL };
        let lanes = (0..lanes).map(|_| Lane {
            requests: Requests::new(limits, FAILOVER),
            links: donors.iter().map(|_| DonorLink::new(dice)).collect(),
            writes: VecDeque::new(),
            decodings: BTreeMap::new(),
        });
        let lanes = lanes.collect();
        let controls = donors.iter().map(|_| Control::new(dice)).collect();
        Borrower {
            map,
            fenced: false,
            space,
            host,
            numbers: donors.to_vec(),
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
            comparing: None,
            repaired_for_moves: 0,
            copies_made: 0,
            copies_left: 0,
            cursor: Cursor::default(),
            inspection: None,
            suspects: Vec::new(),
            deserted: Vec::new(),
            code,
            activity: BTreeMap::new(),
            recoding: None,
            to_record: None,
            recorded: Vec::new(),
            spoiled: Vec::new(),
            coded: 0,
            thawed: 0,
            rebuilt: 0,
            decoded: 0,
        }
    }

    /// As `Space::ask_directory`, which is asked when leases are renewed.
    pub(crate) fn learn(&mut self, donors: &[usize], dice: &mut Dice) {
        for number in donors {
            if self.numbers.contains(number) {
                continue;
            }
            let name = donor_name(*number);
            self.map.donor_named(&name, &Site::unplaced(&name), false);
            self.numbers.push(*number);
            self.controls.push(Control::new(dice));
            self.lanes.iter_mut().for_each(|lane| lane.links.push(DonorLink::new(dice)));
        }
    }

    /// Which of the simulation's donors that is.
    pub(crate) fn number_of(&self, donor: DonorIndex) -> usize {
        self.numbers[donor.0 as usize]
    }

    /// The donors that it knows.
    pub(crate) fn numbers(&self) -> &[usize] {
        &self.numbers
    }

    /// Changes of stripes recorded since the last call.
    pub(crate) fn take_recorded(&mut self) -> Vec<(u64, Option<Coded>)> {
        std::mem::take(&mut self.recorded)
    }

    /// As `Space::watch_temperature`.
    fn watch_temperature(&mut self, now: Duration) {
        let Some(code) = self.code else { return };
        let activity = &self.activity;
        let of = |segment: u64| activity.get(&segment).copied().unwrap_or_default();
        let is_cold = |segment: u64| {
            let Activity { writes, used } = of(segment);
            writes == 0 && now.saturating_sub(used) >= COLD_AFTER
        };
        let stripes = self.map.stripes_to_code(&is_cold);
        for stripe in stripes {
            if self.map.freeze(stripe) && code.segments_of(stripe).any(|s| of(s).writes > 0) {
                self.map.give_up_coding(stripe);
            }
        }
    }

    /// Does what was decided, once it is recorded.
    fn record(&mut self) {
        let Some((stripe, coded)) = self.to_record.take() else { return };
        self.recorded.push((stripe, coded));
        match coded {
            Some(_) => {
                self.coded += 1;
                self.map.recorded(stripe);
            }
            None => {
                self.thawed += 1;
                self.map.thaw(stripe);
                // The parities were given up for copies that seemed to be there.
                let segments = self.code.expect("stripes are coded").segments_of(stripe);
                let is_held = |at: &u64| matches!(self.map.whereabouts(*at), Whereabouts::Held(_));
                self.deserted.extend(segments.filter(is_held));
            }
        }
    }

    /// As `Space::written`.
    fn write_begins(&mut self, segment: u64, now: Duration) {
        let activity = self.activity.entry(segment).or_default();
        activity.writes += 1;
        activity.used = now;
    }

    /// Whether a segment may be written; if not, it will be some time later.
    pub(crate) fn allow_write(&mut self, segment: u64) -> bool {
        self.map.allow_write(segment)
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
                self.activity.entry(segment).or_default().used = net.now;
                let requests = &mut self.lanes[lane].requests;
                let mut groups = Noted {
                    map: &mut self.map,
                    deserted: &mut self.deserted,
                    activity: &mut self.activity,
                };
                let group = (segment, &group);
                match requests.read(token, group, pages, avoid, &mut groups, net.now) {
                    Some(donor) => self.flush(lane, donor.0 as usize, net, dice),
                    None => self.flush_all(lane, net, dice),
                }
                self.connect_where_needed(lane, net, dice);
                self.report(lane, net, dice);
            }
        }
    }

    /// As `Space::free_segment`, for a segment that is held.
    pub(crate) fn free(&mut self, token: u64, segment: u64, net: &mut Network, dice: &mut Dice) {
        let Whereabouts::Held(group) = self.map.whereabouts(segment) else { return };
        self.write_begins(segment, net.now);
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
            if failed != Some(Why::Unreachable) {
                write_ends(&mut self.activity, segment);
            }
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
        self.write_begins(segment, net.now);
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
        if outcome != Err(Why::Unreachable) {
            write_ends(&mut self.activity, segment);
        }
        self.told.push(Told::Control { token, outcome });
    }

    /// Takes the result of a discard at one member.
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
        self.record();
        self.watch_temperature(net.now);
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
            Step::Rebuild(stripe) => {
                let rebuild = self.map.rebuild(stripe);
                let Some(rebuild) = rebuild else { return self.tending = None };
                self.read_shards(rebuild, net, dice);
            }
            Step::Commit(stripe) => {
                let Some((generation, keepers)) = self.map.ready_to_commit(stripe) else {
                    return self.tending = None;
                };
                let left = keepers.len();
                self.recoding = Some(Recoding { left, ..Recoding::default() });
                for (segment, place) in keepers {
                    let job = Job::Keep { stripe, segment, place, generation };
                    self.control(place.donor.0 as usize, job, net, dice);
                }
            }
            Step::Thaw(stripe) => {
                let Some(copies) = self.map.ready_to_thaw(stripe) else {
                    return self.tending = None;
                };
                let left = copies.len();
                if left == 0 {
                    self.to_record = Some((stripe, None));
                    return self.tending = None;
                }
                let asked = copies.clone();
                self.recoding = Some(Recoding { asked, left, ..Recoding::default() });
                for (segment, place) in copies {
                    let job = Job::Ask { stripe, segment, place };
                    self.control(place.donor.0 as usize, job, net, dice);
                }
            }
            Step::Join(donor) => {
                self.control(donor.0 as usize, Job::Join { segment }, net, dice);
            }
            Step::Fill { to, from } => {
                let job = Job::Fill { segment, to, from, first: 0 };
                self.control(to.donor.0 as usize, job, net, dice);
            }
            Step::Compare { group, leaving } => {
                let (next, inspection) = (0, None);
                self.comparing = Some(Comparing { segment, group, leaving, next, inspection });
                self.compare_next(net, dice);
            }
            Step::Leave { from, kept } => {
                let job = Job::Leave { segment, from, kept };
                self.control(kept.donor.0 as usize, job, net, dice);
            }
        }
    }

    /// The segment that the upkeep is at.
    pub(crate) fn is_tending(&self, segment: u64) -> bool {
        self.tending.as_ref().is_some_and(|(tended, _)| *tended == segment)
    }

    /// As `Space::rebuild`, all pages at once, and of all shards that there are.
    fn read_shards(&mut self, rebuild: Rebuild, net: &mut Network, dice: &mut Dice) {
        let code = self.code.expect("stripes are coded");
        let mut shards: Vec<Option<Vec<Value>>> = vec![None; code.shards()];
        let mut jobs = Vec::new();
        for &(shard, segment, place) in &rebuild.sources {
            match place {
                Some(place) => jobs.push((place.donor, Job::ReadShard { shard, segment, place })),
                None => shards[shard] = Some(vec![0; SEGMENT_PAGES as usize]),
            }
        }
        let left = jobs.len();
        let rebuild = Some(rebuild);
        self.recoding = Some(Recoding { rebuild, shards, left, ..Recoding::default() });
        if left == 0 {
            return self.write_shards(net, dice);
        }
        for (donor, job) in jobs {
            self.control(donor.0 as usize, job, net, dice);
        }
    }

    fn write_shards(&mut self, net: &mut Network, dice: &mut Dice) {
        let coder = self.code.expect("stripes are coded").coder();
        let Some(Recoding { rebuild: Some(rebuild), shards, left, .. }) = &mut self.recoding else {
            return;
        };
        let wanted: Vec<usize> = rebuild.targets.iter().map(|(shard, ..)| *shard).collect();
        let is_damaged = |value: &Value| value & DECAYED != 0;
        if rebuild.is_coding && shards.iter().flatten().flatten().any(is_damaged) {
            self.map.give_up_coding(rebuild.stripe);
            self.recoding = None;
            self.tending = None;
            return;
        }
        let read = std::mem::replace(shards, vec![None; shards.len()]);
        for page in 0..SEGMENT_PAGES as usize {
            let of_page = read.iter().map(|values| values.as_ref().map(|values| values[page]));
            let sound = of_page.map(|value| Some(bytes_of(&[value.filter(|v| !is_damaged(v))?])));
            let mut row: Vec<Option<Vec<u8>>> = sound.collect();
            // A lost page reads as something else than was stored.
            let is_there = coder.complete(&mut row, &wanted);
            if !is_there {
                self.spoiled.extend(rebuild.targets.iter().map(|(_, segment, _)| *segment));
            }
            for &shard in &wanted {
                let value = row[shard].as_ref().map(|bytes| values_of(bytes)[0]);
                let value = value.filter(|_| is_there).unwrap_or(DECAYED | 1);
                shards[shard].get_or_insert_default().push(value);
            }
        }
        *left = rebuild.targets.len();
        for (shard, segment, place) in rebuild.targets.clone() {
            let job = Job::WriteShard { shard, segment, place };
            self.control(place.donor.0 as usize, job, net, dice);
        }
    }

    /// One of the donors that a stripe's recoding has asked is done.
    fn recoded(&mut self, job: Job, outcome: Result<(), Why>, net: &mut Network, dice: &mut Dice) {
        let Some(recoding) = &mut self.recoding else { return };
        recoding.left -= 1;
        recoding.failed |= outcome.is_err();
        if recoding.left > 0 {
            return;
        }
        let failed = recoding.failed;
        let asked = Some(std::mem::take(&mut recoding.asked));
        match job {
            Job::ReadShard { .. } if !failed => return self.write_shards(net, dice),
            Job::Keep { stripe, generation, .. } if !failed => {
                let coded = self.map.commit(stripe, generation);
                self.to_record = coded.map(|coded| (stripe, Some(coded)));
                if dice.below(2) == 0 {
                    self.record();
                }
            }
            Job::Ask { stripe, .. } if !failed && self.map.ready_to_thaw(stripe) == asked => {
                self.to_record = Some((stripe, None));
                if dice.below(2) == 0 {
                    self.record();
                }
            }
            _ => {}
        }
        self.recoding = None;
        let Some((segment, tried)) = self.tending.take() else { return };
        if failed {
            self.map.put_off(segment);
        } else if self.to_record.is_none() {
            self.tend_segment(segment, tried, net, dice);
        }
    }

    /// As `Space::suspect`.
    pub(crate) fn suspect(&mut self, segment: u64, page: u32) {
        self.suspects.push((segment, page / SCRUB_PAGES * SCRUB_PAGES));
    }

    /// As `Space::scrub`, one question at a time. Returns a finished run with its report, or the
    /// end of a round.
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
        let (donor, job) = match job_of(segment, inspection.next(known), false) {
            Ok(asked) => asked,
            Err(report) => {
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

    /// As `Space::compare`, one question at a time.
    fn compare_next(&mut self, net: &mut Network, dice: &mut Dice) {
        loop {
            let Some(comparing) = &mut self.comparing else { return };
            let Comparing { segment, group, leaving, next, inspection } = comparing;
            let (segment, group) = (*segment, *group);
            if let Some((inspection, is_asking)) = inspection {
                if *is_asking {
                    return;
                }
                match job_of(segment, inspection.next(&|_| None), true) {
                    Ok((donor, job)) => {
                        *is_asking = true;
                        return self.control(donor.0 as usize, job, net, dice);
                    }
                    Err(report) => {
                        self.repaired_for_moves += report.repaired;
                        if report.is_cut_short {
                            break self.compare_no_more(segment);
                        }
                    }
                }
            }
            if *next >= SEGMENT_PAGES as u32 {
                self.map.compared(segment, group);
                self.comparing = None;
                let Some((_, tried)) = self.tending.take() else { return };
                return self.tend_segment(segment, tried, net, dice);
            }
            let Some(run) = self.map.run_to_compare(segment, *next, SCRUB_PAGES) else {
                break self.compare_no_more(segment);
            };
            *next += run.count;
            let run = run.before_leaving(*leaving);
            *inspection = Some((Inspection::new(run, SEGMENT_PAGES, sum_of(0)), false));
        }
    }

    fn compare_no_more(&mut self, segment: u64) {
        self.map.put_off(segment);
        (self.comparing, self.tending) = (None, None);
    }

    fn scrub_answered(&mut self, for_move: bool, tell: impl FnOnce(&mut Inspection)) {
        let asking = match for_move {
            true => self.comparing.as_mut().and_then(|comparing| comparing.inspection.as_mut()),
            false => self.inspection.as_mut(),
        };
        if let Some((inspection, is_asking)) = asking {
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

    /// Does the work of a thread that waits in `Lane::write`.
    fn push_writes(&mut self, lane: usize, net: &mut Network, dice: &mut Dice) {
        while let Some(write) = self.lanes[lane].writes.front() {
            let (segment, token) = (write.segment, write.token);
            let mut why = None;
            if self.fenced {
                why = Some(Why::Fenced);
            } else if write.writing.is_none() {
                match self.map.begin(segment) {
                    Take::Held(group) => {
                        self.write_begins(segment, net.now);
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
                    Take::Coded => why = Some(Why::Coded),
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
                    write_ends(&mut self.activity, segment);
                    self.told.push(Told::Failed { token, why });
                }
                _ => {
                    for place in requests.unsent(&writing) {
                        requests.give_up(&writing, place, Cause::Unreachable);
                    }
                    let mut groups = Noted {
                        map: &mut self.map,
                        deserted: &mut self.deserted,
                        activity: &mut self.activity,
                    };
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
        let Lane { requests, links, writes, .. } = &mut self.lanes[lane];
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
        let data = net.carry(write.values.clone(), dice);
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
        let conn = net.connect(self.host, self.numbers[donor]);
        link.conn = Some(conn);
        link.window = Window::new(WINDOW);
        link.open = false;
        link.begun = net.now;
        self.conns.insert(conn, End::Lane(lane, donor));
        net.send_to_donor(
            conn,
            ToDonor::Hello { space: self.space, epoch: self.epoch, lane: link.lane },
            dice,
        );
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
            let mut groups = Noted {
                map: &mut self.map,
                deserted: &mut self.deserted,
                activity: &mut self.activity,
            };
            requests.fail_over(index_of(donor), &mut groups, net.now);
            self.flush_all(lane, net, dice);
        }
        self.connect_where_needed(lane, net, dice);
    }

    /// Does everything that is due by the clock.
    pub(crate) fn tick(&mut self, net: &mut Network, dice: &mut Dice) {
        for lane in 0..self.lanes.len() {
            for donor in self.lanes[lane].requests.flights.tick(net.now) {
                self.broke(lane, donor.0 as usize, net, dice);
            }
            if self.copies > 1 {
                for donor in self.lanes[lane].requests.flights.silent(net.now, FAILOVER) {
                    self.broke(lane, donor.0 as usize, net, dice);
                }
                let mut groups = Noted {
                    map: &mut self.map,
                    deserted: &mut self.deserted,
                    activity: &mut self.activity,
                };
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
                let message = match message {
                    ToBorrower::Answer { id, answered, load, data } => {
                        let data = net.carry(data, dice);
                        ToBorrower::Answer { id, answered, load, data }
                    }
                    welcome => welcome,
                };
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
        let Lane { requests, links, decodings, .. } = &mut self.lanes[lane];
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
                            if piece.is_empty() {
                                continue;
                            }
                            let Some(new) = requests.pages(slot, at, piece.len(), net.now) else {
                                continue;
                            };
                            let (from, values) = (new.from, piece[new.skip..].to_vec());
                            let giver = Some(index_of(donor));
                            match new.to {
                                Recipient::Owner(token) => {
                                    self.told.push(Told::Shown { token, from, values, giver });
                                }
                                Recipient::Decoding { decoding, shard, .. }
                                    if values.iter().all(|value| value & DECAYED == 0) =>
                                {
                                    let kept = decodings.entry((decoding, shard)).or_default();
                                    kept.truncate(from);
                                    kept.extend(values);
                                }
                                Recipient::Decoding { decoding, shard, place } => {
                                    let mut groups = Noted {
                                        map: &mut self.map,
                                        deserted: &mut self.deserted,
                                        activity: &mut self.activity,
                                    };
                                    requests.shard_is_damaged(
                                        decoding,
                                        (shard, place),
                                        &mut groups,
                                        net.now,
                                    );
                                }
                            }
                        }
                    }
                    Answered::Done => {
                        let mut groups = Noted {
                            map: &mut self.map,
                            deserted: &mut self.deserted,
                            activity: &mut self.activity,
                        };
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
        let Lane { requests, decodings, .. } = &mut self.lanes[lane];
        let mut groups = Noted {
            map: &mut self.map,
            deserted: &mut self.deserted,
            activity: &mut self.activity,
        };
        requests.settle(&mut groups, net.now);
        while let Some(end) = requests.next_end() {
            self.told.push(match end {
                Ended::Decoded { decoding } => {
                    let Some(decoded) = requests.take_decoded(decoding, &mut groups, net.now)
                    else {
                        continue;
                    };
                    let pages = decoded.skip + decoded.count;
                    let mut shards: Vec<Option<Vec<u8>>> = vec![None; decoded.shards];
                    for &shard in &decoded.zeros {
                        shards[shard] = Some(vec![0; 8 * pages]);
                    }
                    for &shard in &decoded.come {
                        let values = decodings.remove(&(decoding, shard)).expect("it has come");
                        assert_eq!(values.len(), pages, "pages of a shard are missing");
                        shards[shard] = Some(bytes_of(&values));
                    }
                    let coder = self.code.expect("stripes are coded").coder();
                    assert!(coder.complete(&mut shards, &[decoded.wanted]), "too few shards");
                    let values = values_of(shards[decoded.wanted].as_ref().expect("worked out"));
                    self.decoded += 1;
                    Told::Shown {
                        token: decoded.token,
                        from: decoded.from,
                        values: values[decoded.skip..].to_vec(),
                        giver: Some(DonorIndex::UNKNOWN),
                    }
                }
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
        decodings.retain(|(decoding, _), _| requests.is_decoding(*decoding));
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
                    let conn = net.connect(self.host, self.numbers[donor]);
                    control.conn = Some(conn);
                    control.window = Window::new(WINDOW);
                    control.stage = Stage::Opening;
                    control.since = net.now;
                    control.begun = net.now;
                    self.conns.insert(conn, End::Control(donor));
                    net.send_to_donor(
                        conn,
                        ToDonor::Hello { space: self.space, epoch: self.epoch, lane: control.lane },
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
                        | Job::ReadShard { segment, place, .. }
                        | Job::WriteShard { segment, place, .. }
                        | Job::Keep { segment, place, .. }
                        | Job::Ask { segment, place, .. }
                        | Job::Repair { segment, to: place, .. } => Some((segment, place.boot)),
                        _ => None,
                    };
                    if let Some((segment, _)) = expected.filter(|(_, boot)| *boot != control.boot) {
                        self.finish(donor, job, Err(Why::Lost { segment }), net, dice);
                        continue;
                    }
                    let mut data = Vec::new();
                    let asked = match job {
                        Job::ReadShard { place, .. } => Asked::Read {
                            extent: place.extent,
                            pages: (0..SEGMENT_PAGES as u32).collect(),
                        },
                        Job::WriteShard { shard, place, .. } => {
                            let shards = self.recoding.as_ref().map(|recoding| &recoding.shards);
                            let values = shards.and_then(|shards| shards[shard].clone());
                            let values = values.expect("it was worked out");
                            let pages = (0..).zip(values).filter(|(_, value)| *value != 0);
                            let (pages, values): (Vec<u32>, Vec<Value>) = pages.unzip();
                            if pages.is_empty() {
                                self.shard_written(donor, job, net, dice);
                                continue;
                            }
                            let sums = values.iter().map(|value| sum_of(*value)).collect();
                            data = values;
                            let generation = Generation::FILLING;
                            Asked::Write { extent: place.extent, generation, pages, sums }
                        }
                        Job::Keep { place, generation, .. } => {
                            Asked::Confirm { extent: place.extent, generation }
                        }
                        Job::Ask { place, .. } => {
                            Asked::Read { extent: place.extent, pages: vec![0] }
                        }
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
                            let from =
                                (self.numbers[from.donor.0 as usize], from.boot, from.extent);
                            Asked::Fill { extent: to.extent, first, count, from }
                        }
                        Job::Confirm { to, generation, .. } => {
                            Asked::Confirm { extent: to.extent, generation }
                        }
                        Job::Verify { place, first, count, .. } => {
                            Asked::Verify { extent: place.extent, first, count }
                        }
                        Job::Repair { to, from, first, count, .. } => {
                            let from =
                                (self.numbers[from.donor.0 as usize], from.boot, from.extent);
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
                    self.ask_with(donor, asked, data, net, dice);
                    return;
                }
            }
        }
    }

    fn ask(&mut self, donor: usize, asked: Asked, net: &mut Network, dice: &mut Dice) {
        self.ask_with(donor, asked, Vec::new(), net, dice);
    }

    fn ask_with(
        &mut self,
        donor: usize,
        asked: Asked,
        data: Vec<Value>,
        net: &mut Network,
        dice: &mut Dice,
    ) {
        let control = &mut self.controls[donor];
        let Some(conn) = control.conn else { return };
        let id = control.window.admit(0, &asked.as_request());
        control.asked = true;
        control.since = net.now;
        net.send_to_donor(conn, ToDonor::Request { id, asked, data }, dice);
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
            (ToBorrower::Answer { id, answered, load, data }, stage)
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
                        self.job_answered(donor, (answered, &data), net, dice);
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
        (answered, data): (Answered, &[Value]),
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
            (Job::ReadShard { shard, .. }, Answered::Pages(_)) => {
                if let Some(recoding) = &mut self.recoding {
                    recoding.shards[shard] = Some(data.to_vec());
                }
                Ok(())
            }
            (Job::ReadShard { segment, place, .. }, Answered::Refused(Refusal::NoSuchExtent))
            | (
                Job::Keep { segment, place, .. } | Job::Ask { segment, place, .. },
                Answered::Refused(Refusal::NoSuchExtent),
            ) => {
                self.map.gone(segment, place);
                Err(Why::Lost { segment })
            }
            (Job::WriteShard { segment, place, .. }, Answered::Refused(Refusal::NoSuchExtent)) => {
                let _ = self.map.desert(segment, place);
                Err(Why::Lost { segment })
            }
            (Job::WriteShard { .. }, Answered::Done) => {
                return self.shard_written(donor, job, net, dice);
            }
            (Job::Keep { .. }, Answered::Done) | (Job::Ask { .. }, Answered::Pages(_)) => Ok(()),
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
            (Job::Verify { for_move, place, .. }, Answered::Verified(states)) => {
                self.scrub_answered(for_move, |inspection| inspection.verified(place, &states));
                Ok(())
            }
            (Job::Repair { for_move, .. }, Answered::Done) => {
                self.scrub_answered(for_move, Inspection::mended);
                Ok(())
            }
            (Job::Verify { segment, place, .. }, Answered::Refused(Refusal::NoSuchExtent)) => {
                self.map.gone(segment, place);
                Err(Why::Unreachable)
            }
            (Job::Repair { .. }, Answered::Refused(Refusal::NoSuchExtent | Refusal::NoSource)) => {
                Err(Why::Unreachable)
            }
            (Job::Take { segment, .. }, Answered::Allocated(extent)) => {
                let boot = self.controls[donor].boot;
                let place = Place { donor: index_of(donor), boot, extent };
                match self.map.allocated(segment, place) {
                    Take::Ask(next, generation) => {
                        let job = Job::Take { segment, generation };
                        self.control(next.0 as usize, job, net, dice);
                    }
                    Take::NoRoom => self.no_room(segment),
                    Take::Held(_) | Take::Wait | Take::Lost(_) | Take::Coded => {}
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

    /// A shard is where it belongs, and is to be confirmed.
    fn shard_written(&mut self, donor: usize, job: Job, net: &mut Network, dice: &mut Dice) {
        let Job::WriteShard { segment, place, .. } = job else { return };
        match self.generation_with(segment, place) {
            Some(generation) => {
                self.rebuilt += 1;
                let confirm = Job::Confirm { segment, to: place, generation };
                self.controls[donor].jobs[0] = (confirm, net.now);
            }
            None => self.finish(donor, job, Err(Why::Lost { segment }), net, dice),
        }
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
                            Take::Held(_) | Take::Wait | Take::Lost(_) | Take::Coded => {}
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
            Job::Verify { for_move, .. } | Job::Repair { for_move, .. } => {
                if outcome.is_err() {
                    let failed = |inspection: &mut Inspection| inspection.failed(index_of(donor));
                    self.scrub_answered(for_move, failed);
                }
                if for_move {
                    self.compare_next(net, dice);
                }
            }
            Job::ReadShard { .. } | Job::Keep { .. } | Job::Ask { .. } => {
                self.recoded(job, outcome, net, dice);
            }
            Job::WriteShard { .. } | Job::Confirm { .. } if self.recoding.is_some() => {
                self.recoded(job, outcome, net, dice);
            }
            Job::WriteShard { .. } => {}
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
