//! The simulated network and its clock: connections that keep their order and lose, repeat, delay
//! and break.
//!
//! Data of a broken connection may still arrive at the donor, as from a kernel's buffers. That
//! makes takeovers and retries dangerous.

use crate::cluster::Letter;
use crate::dice::Dice;
use hecaton_memory::{Epoch, ExtentId, Generation, SpaceId};
use hecaton_transport::protocol::{
    Answer, FillSource, HeldExtent, Load, PageState, Refusal, Request,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// Contents of a page in the simulation. Zero is a page of zeros.
pub(crate) type Value = u64;

/// The checksum of a page that holds the value.
pub(crate) fn sum_of(value: Value) -> u32 {
    (value as u32).wrapping_mul(2_654_435_761)
}

/// Bit of values that nobody wrote: contents of pages that have gone bad in a donor's memory.
pub(crate) const DECAYED: Value = 1 << 63;

/// A page in a donor's memory, and the sum that is kept for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) value: Value,
    pub(crate) sum: u32,
}

impl Stored {
    pub(crate) fn is_sound(self) -> bool {
        sum_of(self.value) == self.sum
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnId(pub(crate) u64);

/// A request with tables of its own.
#[derive(Clone, Debug)]
pub(crate) enum Asked {
    Read {
        extent: ExtentId,
        pages: Vec<u32>,
    },
    Write {
        extent: ExtentId,
        generation: Generation,
        pages: Vec<u32>,
        sums: Vec<u32>,
    },
    Discard {
        extent: ExtentId,
        generation: Generation,
        first: u32,
        count: u32,
    },
    Allocate {
        segment: u64,
        order: u8,
        generation: Generation,
    },
    /// From the donor of that number.
    Fill {
        extent: ExtentId,
        first: u32,
        count: u32,
        from: (usize, u64, ExtentId),
    },
    Confirm {
        extent: ExtentId,
        generation: Generation,
    },
    Verify {
        extent: ExtentId,
        first: u32,
        count: u32,
    },
    /// From the donor of that number.
    Repair {
        extent: ExtentId,
        first: u32,
        count: u32,
        from: (usize, u64, ExtentId),
    },
    Free {
        extent: ExtentId,
    },
    FreeAll,
    List {
        from: ExtentId,
    },
    Fence,
    Renew,
}

impl Asked {
    pub(crate) fn as_request(&self) -> Request<'_> {
        match self {
            Asked::Read { extent, pages } => Request::Read { extent: *extent, pages },
            Asked::Write { extent, generation, pages, sums } => {
                Request::Write { extent: *extent, generation: *generation, pages, sums }
            }
            &Asked::Discard { extent, generation, first, count } => {
                Request::Discard { extent, generation, first, count }
            }
            &Asked::Allocate { segment, order, generation } => {
                Request::Allocate { segment, member: 0, order, generation }
            }
            &Asked::Fill { extent, first, count, from } => {
                Request::Fill { extent, first, count, source: source(from) }
            }
            &Asked::Repair { extent, first, count, from } => {
                Request::Repair { extent, first, count, source: source(from) }
            }
            &Asked::Verify { extent, first, count } => Request::Verify { extent, first, count },
            &Asked::Confirm { extent, generation } => Request::Confirm { extent, generation },
            Asked::Free { extent } => Request::Free { extent: *extent },
            Asked::FreeAll => Request::FreeAll,
            Asked::List { from } => Request::List { from: *from },
            Asked::Fence => Request::Fence,
            Asked::Renew => Request::Renew,
        }
    }
}

fn source((donor, boot, extent): (usize, u64, ExtentId)) -> FillSource {
    FillSource { address: ([127, 0, 0, 1], donor as u16).into(), boot, extent }
}

/// An answer with tables of its own.
#[derive(Clone, Debug)]
pub(crate) enum Answered {
    Pages(Vec<u32>),
    Done,
    Allocated(ExtentId),
    Held(Vec<HeldExtent>),
    Verified(Vec<PageState>),
    Refused(Refusal),
}

impl Answered {
    pub(crate) fn as_answer(&self) -> Answer<'_> {
        match self {
            Answered::Pages(sums) => Answer::Pages(sums),
            Answered::Done => Answer::Done,
            Answered::Allocated(extent) => Answer::Allocated(*extent),
            Answered::Held(lines) => Answer::Held(lines),
            Answered::Verified(states) => Answer::Verified(states),
            Answered::Refused(refusal) => Answer::Refused(*refusal),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum ToDonor {
    Hello { space: SpaceId, epoch: Epoch, lane: u64 },
    Request { id: u64, asked: Asked, data: Vec<Value> },
}

#[derive(Clone, Debug)]
pub(crate) enum ToBorrower {
    Welcome(Result<(u64, Load), Refusal>),
    Answer { id: u64, answered: Answered, load: Load, data: Vec<Value> },
}

#[derive(Debug)]
pub(crate) enum Event {
    AtDonor(ConnId, ToDonor),
    AtBorrower(ConnId, ToBorrower),
    DonorSeesEnd(ConnId),
    BorrowerSeesEnd(ConnId),
    /// The data is no frame: its checksum, or that of TLS around it, is wrong.
    DonorSeesGarbled(ConnId),
    BorrowerSeesGarbled(ConnId),
    /// Pages that a donor has read from another one are stored now.
    Filled {
        conn: ConnId,
        id: u64,
        extent: ExtentId,
        first: u32,
        pages: Vec<Stored>,
    },
    /// The same for pages that are to be mended.
    Mended {
        conn: ConnId,
        id: u64,
        extent: ExtentId,
        pages: Vec<(u32, Stored)>,
    },
    /// Between managers, their registry's keeper, and nodes.
    Letter(Letter),
}

/// How bad the network is, each in so many of a thousand messages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) dropped: u64,
    pub(crate) repeated: u64,
    pub(crate) cut: u64,
    pub(crate) slow: u64,
    /// Messages with pages, in which one page is altered.
    pub(crate) damaged: u64,
    /// Those of which anything else is not what was sent. Frames have checksums, and TCP and TLS
    /// around them and around HTTP: whoever receives such a one closes the connection.
    pub(crate) garbled: u64,
}

/// In which directions a donor is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Both,
    /// It hears nothing.
    Deaf,
    /// It says nothing.
    Mute,
}

/// A machine. Each donor is on the one that has its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Host(pub(crate) usize);

struct Line {
    host: Host,
    donor: usize,
    /// When the latest message of each direction arrives; later ones arrive later.
    latest: [Duration; 2],
    severed: bool,
}

pub(crate) struct Network {
    pub(crate) now: Duration,
    pub(crate) faults: Faults,
    /// Donors that nothing reaches and nothing leaves until then.
    silent_until: Vec<[Duration; 2]>,
    /// From which machine nothing gets to which other one, and until when.
    parted_until: BTreeMap<(Host, Host), Duration>,
    lines: BTreeMap<ConnId, Line>,
    queue: BTreeMap<(Duration, u64), Event>,
    sequence: u64,
    /// Messages that were garbled.
    pub(crate) garbled: u64,
}

const TO_DONOR: usize = 0;
const TO_BORROWER: usize = 1;

impl Network {
    pub(crate) fn new(donors: usize, faults: Faults) -> Network {
        Network {
            now: Duration::ZERO,
            faults,
            silent_until: vec![[Duration::ZERO; 2]; donors],
            parted_until: BTreeMap::new(),
            lines: BTreeMap::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            garbled: 0,
        }
    }

    pub(crate) fn connect(&mut self, host: Host, donor: usize) -> ConnId {
        self.sequence += 1;
        let conn = ConnId(self.sequence);
        let line = Line { host, donor, latest: [self.now; 2], severed: false };
        self.lines.insert(conn, line);
        conn
    }

    pub(crate) fn donor_of(&self, conn: ConnId) -> usize {
        self.lines[&conn].donor
    }

    pub(crate) fn send_to_donor(&mut self, conn: ConnId, message: ToDonor, dice: &mut Dice) {
        self.send(conn, TO_DONOR, dice, || Event::AtDonor(conn, message.clone()));
    }

    pub(crate) fn send_to_borrower(&mut self, conn: ConnId, message: ToBorrower, dice: &mut Dice) {
        self.send(conn, TO_BORROWER, dice, || Event::AtBorrower(conn, message.clone()));
    }

    fn send(&mut self, conn: ConnId, way: usize, dice: &mut Dice, event: impl Fn() -> Event) {
        let line = &self.lines[&conn];
        let (from, to) = match way {
            TO_DONOR => (line.host, Host(line.donor)),
            _ => (Host(line.donor), line.host),
        };
        let is_silent = self.silent_until[line.donor][way] > self.now;
        if line.severed || is_silent || self.is_parted(from, to) {
            return;
        }
        if dice.permille(self.faults.cut) {
            self.sever(conn, dice);
        }
        if dice.permille(self.faults.dropped) {
            return;
        }
        let micros = match dice.permille(self.faults.slow) {
            true => dice.below(400_000),
            false => 20 + dice.below(200),
        };
        let line = self.lines.get_mut(&conn).expect("a known connection");
        let at = line.latest[way].max(self.now + Duration::from_micros(micros));
        line.latest[way] = at;
        if self.garbles(dice) {
            return self
                .schedule(at, [Event::DonorSeesGarbled, Event::BorrowerSeesGarbled][way](conn));
        }
        self.schedule(at, event());
        if dice.permille(self.faults.repeated) {
            // Right behind the first: a stream does not bring again what it brought long ago.
            self.schedule(at, event());
        }
    }

    /// Whether what is sent now arrives as something else.
    fn garbles(&mut self, dice: &mut Dice) -> bool {
        let is_garbled = self.faults.garbled > 0 && dice.permille(self.faults.garbled);
        self.garbled += u64::from(is_garbled);
        is_garbled
    }

    /// Pages as they arrive.
    pub(crate) fn carry(&self, mut data: Vec<Value>, dice: &mut Dice) -> Vec<Value> {
        if self.faults.damaged > 0 && !data.is_empty() && dice.permille(self.faults.damaged) {
            let at = dice.below(data.len() as u64) as usize;
            data[at] = DECAYED | (data[at] ^ 1);
        }
        data
    }

    /// Sends a letter. A lost letter is not sent again: its sender times out. For a garbled one,
    /// the side that asked hears at once.
    pub(crate) fn post(&mut self, letter: Letter, dice: &mut Dice) {
        if self.is_parted(letter.from, letter.to) || dice.permille(self.faults.dropped) {
            return;
        }
        if self.garbles(dice) {
            return self.post(letter.garbled(), dice);
        }
        let micros = match dice.permille(self.faults.slow) {
            true => dice.below(400_000),
            false => 20 + dice.below(200),
        };
        self.schedule(self.now + Duration::from_micros(micros), Event::Letter(letter));
    }

    /// For so long nothing reaches the donor, nothing leaves it, or both.
    pub(crate) fn cut_off(&mut self, donor: usize, cut: Cut, time: Duration) {
        let until = self.now + time;
        let [to_donor, to_borrower] = &mut self.silent_until[donor];
        if cut != Cut::Mute {
            *to_donor = until;
        }
        if cut != Cut::Deaf {
            *to_borrower = until;
        }
    }

    /// For so long nothing gets from the one machine to the other.
    pub(crate) fn part(&mut self, from: Host, to: Host, time: Duration) {
        self.parted_until.insert((from, to), self.now + time);
    }

    /// Whether nothing gets from the one machine to the other.
    pub(crate) fn is_parted(&self, from: Host, to: Host) -> bool {
        self.parted_until.get(&(from, to)).is_some_and(|until| *until > self.now)
    }

    /// Whether a donor that asks another one is answered, in frames.
    pub(crate) fn hears(&mut self, (donor, other): (usize, usize), dice: &mut Dice) -> bool {
        let (here, there) = (Host(donor), Host(other));
        let is_parted = self.is_parted(here, there) || self.is_parted(there, here);
        let is_silent = self.silent_until[other].iter().any(|until| *until > self.now);
        !is_parted && !is_silent && !self.garbles(dice)
    }

    /// Nobody is cut off any more, and nothing goes wrong.
    pub(crate) fn heal(&mut self) {
        self.faults = Faults::default();
        self.silent_until.fill([Duration::ZERO; 2]);
        self.parted_until.clear();
    }

    /// Breaks the connection: nothing more gets in, what is in it may still arrive, and each side
    /// sees it some time.
    pub(crate) fn sever(&mut self, conn: ConnId, dice: &mut Dice) {
        let line = self.lines.get_mut(&conn).expect("a known connection");
        if std::mem::replace(&mut line.severed, true) {
            return;
        }
        for event in [Event::DonorSeesEnd(conn), Event::BorrowerSeesEnd(conn)] {
            let at = self.now + Duration::from_micros(dice.below(500_000));
            self.schedule(at, event);
        }
    }

    /// Breaks all connections to a donor that is gone: what was on the way to it is gone, too.
    pub(crate) fn sever_all(&mut self, donor: usize, dice: &mut Dice) {
        let of_donor: Vec<ConnId> = self
            .lines
            .iter()
            .filter(|(_, line)| line.donor == donor)
            .map(|(conn, _)| *conn)
            .collect();
        for conn in of_donor {
            self.sever(conn, dice);
            self.queue.retain(|_, event| !matches!(event, Event::AtDonor(at, _) if *at == conn));
        }
    }

    pub(crate) fn schedule(&mut self, at: Duration, event: Event) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), event);
    }

    /// The next event that happens before `until`; the clock goes with it.
    pub(crate) fn next(&mut self, until: Duration) -> Option<Event> {
        let (at, _) = *self.queue.first_key_value()?.0;
        if at >= until {
            return None;
        }
        self.now = at;
        self.queue.pop_first().map(|(_, event)| event)
    }
}
