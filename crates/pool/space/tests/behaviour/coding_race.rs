//! A write meets the start of coding: all orders in which the steps of the two can come.
//!
//! The one who writes says so, looks where the segment is without a lock, and writes to each copy.
//! The one who codes publishes that the stripe is coding, looks whether anybody writes, makes the
//! parity from one copy of each segment, and then does without the other copies. Whatever comes
//! when, what was acknowledged is in all copies that count, and a parity is that of what its stripe
//! holds.

use hecaton_memory::{Epoch, ExtentId};
use hecaton_policy::site::Site;
use hecaton_space::code::FIRST_PARITY;
use hecaton_space::group::{DonorIndex, Form, Group, Place};
use hecaton_space::lookup::{Lookup, Whereabouts};
use hecaton_space::map::{Map, Shape, Take};
use hecaton_space::upkeep::Step;
use hecaton_transport::protocol::Load;
use std::collections::BTreeMap;
use std::time::Duration;

const STRIPE: u64 = 0;
const OLD: u32 = 1;
const NEW: u32 = 2;

/// Contents of each copy of each segment.
type Extents = BTreeMap<(u64, DonorIndex), u32>;

struct World {
    map: Map,
    lookup: Lookup,
    extents: Extents,
}

impl World {
    /// Two segments in two copies each.
    fn new() -> World {
        let code = Some("2+1".parse().unwrap());
        let shape = Shape { segments: 2, segment_pages: 8, copies: 2, epoch: Epoch(1), code };
        let mut map = Map::new(shape);
        let load = Load { free_pages: 999, ..Load::default() };
        for (name, boot) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
            let donor = map.donor_named(name, &Site::unplaced(name), false);
            assert!(map.heard(donor, boot, load, Duration::ZERO, Duration::ZERO));
        }
        let mut extents = Extents::new();
        for segment in 0..2 {
            let mut take = map.begin(segment);
            while let Take::Ask(donor, _) = take {
                let boot = map.donor(donor).boot.unwrap();
                let place = Place { donor, boot, extent: ExtentId(segment) };
                extents.insert((segment, donor), OLD);
                take = map.allocated(segment, place);
            }
        }
        let mut world = World { map, lookup: Lookup::new(2, 1), extents };
        world.settle();
        world
    }

    /// Runs the upkeep, which finds that nothing is missing. Before that, nothing can be coded.
    fn settle(&mut self) {
        for segment in self.map.segments_to_tend(9) {
            assert_eq!(self.map.next_step(segment, &[]), Step::Nothing);
        }
        self.publish();
    }

    fn publish(&mut self) {
        for segment in self.map.take_changed() {
            self.lookup.set(segment, self.map.whereabouts(segment));
        }
    }

    fn is_coded(&self) -> bool {
        self.map.coded().any(|stripe| stripe == STRIPE)
    }

    fn group(&self, segment: u64) -> Group {
        match self.map.whereabouts(segment) {
            Whereabouts::Held(group) => group,
            other => panic!("segment {segment} is {other:?}"),
        }
    }
}

#[derive(Default)]
struct Writer {
    segment: u64,
    seen: Option<Group>,
    refused: bool,
    acknowledged: bool,
}

impl Writer {
    const STEPS: usize = 6;

    fn step(&mut self, step: usize, world: &mut World) {
        let activity = world.lookup.activity(self.segment);
        match step {
            0 => activity.write_begins(Duration::ZERO),
            1 => match world.lookup.get(self.segment) {
                Whereabouts::Held(group) => self.seen = Some(group),
                other => panic!("{other:?}"),
            },
            2 if self.seen.is_some_and(|group| group.form == Form::Copies) => {}
            2 => {
                self.refused = !world.map.allow_write(self.segment);
                world.publish();
                self.seen = Some(world.group(self.segment));
                if self.refused {
                    world.lookup.activity(self.segment).write_ends();
                }
            }
            3 | 4 if !self.refused => {
                let place = self.seen.and_then(|group| group.whole().nth(step - 3)).unwrap();
                if let Some(held) = world.extents.get_mut(&(self.segment, place.donor)) {
                    *held = NEW;
                }
            }
            5 if !self.refused => {
                activity.write_ends();
                self.acknowledged = true;
            }
            _ => {}
        }
    }
}

#[derive(Default)]
struct Coder {
    parity: Option<Place>,
    read: Vec<u32>,
}

impl Coder {
    const STEPS: usize = 8;

    fn step(&mut self, step: usize, world: &mut World) {
        let parity = FIRST_PARITY;
        match step {
            0 => assert!(world.map.freeze(STRIPE) || world.map.coded().next().is_none()),
            1 if (0..2).any(|segment| world.lookup.activity(segment).is_written()) => {
                world.map.give_up_coding(STRIPE);
            }
            2 => {
                if let Step::Join(donor) = world.map.next_step(parity, &[]) {
                    let boot = world.map.donor(donor).boot.unwrap();
                    let place = Place { donor, boot, extent: ExtentId(9) };
                    world.extents.insert((parity, donor), 0);
                    assert!(world.map.join(parity, place));
                    self.parity = Some(place);
                }
            }
            3 | 4 => {
                let Some(rebuild) = world.map.rebuild(STRIPE) else { return };
                let (_, segment, place) = rebuild.sources[step - 3];
                self.read.push(world.extents[&(segment, place.unwrap().donor)]);
            }
            5 => {
                let (Some(place), &[one, other]) = (self.parity, &self.read[..]) else { return };
                world.extents.insert((parity, place.donor), one ^ other);
                if let Whereabouts::Held(group) = world.map.whereabouts(parity) {
                    assert!(world.map.filled(parity, place, group.generation));
                }
            }
            6 => {
                if let Some((generation, _)) = world.map.ready_to_commit(STRIPE) {
                    assert!(world.map.commit(STRIPE, generation).is_some());
                }
            }
            7 => world.map.recorded(STRIPE),
            _ => {}
        }
        world.publish();
    }
}

fn check(order: u32, world: &World, writer: &Writer) -> bool {
    assert!(writer.refused != writer.acknowledged, "order {order:b}");
    let wanted = |segment| match writer.acknowledged && segment == writer.segment {
        true => NEW,
        false => OLD,
    };
    let mut parity = 0;
    for segment in 0..2 {
        let group = world.group(segment);
        assert!(group.whole().next().is_some());
        for place in group.whole() {
            let held = world.extents[&(segment, place.donor)];
            assert_eq!(held, wanted(segment), "order {order:b}, segment {segment}");
        }
        parity ^= wanted(segment);
    }
    if world.is_coded() {
        let place = world.group(FIRST_PARITY).whole().next().unwrap();
        assert_eq!(world.extents[&(FIRST_PARITY, place.donor)], parity, "order {order:b}");
    }
    world.is_coded()
}

#[test]
fn a_write_that_meets_the_start_of_coding_is_in_what_is_coded_or_is_refused_or_prevents_it() {
    let steps = Writer::STEPS + Coder::STEPS;
    // Each order is a bit set: the writer takes the steps whose bit is one.
    let orders = (0..1u32 << steps).filter(|order| order.count_ones() as usize == Writer::STEPS);
    let (mut coded, mut refused, mut prevented) = (0, 0, 0);
    for order in orders {
        for segment in 0..2 {
            let mut world = World::new();
            let (mut writer, mut coder) =
                (Writer { segment, ..Writer::default() }, Coder::default());
            let mut done = [0, 0];
            for at in 0..steps {
                let is_writer = order >> at & 1 == 1;
                let next = &mut done[usize::from(is_writer)];
                let step = *next;
                *next += 1;
                match is_writer {
                    true => writer.step(step, &mut world),
                    false => coder.step(step, &mut world),
                }
            }
            match (check(order, &world, &writer), writer.refused) {
                (_, true) => refused += 1,
                (true, false) => coded += 1,
                (false, false) => prevented += 1,
            }
        }
    }
    assert!(coded > 0 && refused > 0 && prevented > 0, "{coded}, {refused}, {prevented}");
}
