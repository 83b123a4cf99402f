//! The governor against hosts that say anything at any time, and applications that do or do not as
//! they are told.

use hecaton_guest::{
    Action, ApplicationStatus, Bounds, Governor, Memory, Order, Reason, Settings, limits,
};
use hecaton_vm::guest_port::{GuestMessage, HostMessage, Notice};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;

const G: u64 = 1 << 30;
const PATIENCE: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(250);

fn settings() -> Settings {
    Settings { reserve_bytes: G, free_bytes: 0, patience: PATIENCE }
}

fn application(name: &str, min: u64, max: u64, hears: bool) -> Bounds {
    Bounds { name: name.into(), min_bytes: min, max_bytes: max, hears_of_evictions: hears }
}

fn memory(total: u64, available: u64) -> Memory {
    Memory { total_bytes: total, available_bytes: available }
}

/// A governor, the clock, and what it has said.
struct Run {
    governor: Governor,
    now: Duration,
    memory: Memory,
}

impl Run {
    fn new(settings: Settings, bounds: Vec<Bounds>, memory: Memory) -> Run {
        Run { governor: Governor::new(settings, bounds), now: Duration::ZERO, memory }
    }

    fn hear(&mut self, message: HostMessage) {
        self.governor.hear(&message, self.now);
    }

    fn step(&mut self) -> Vec<Action> {
        self.governor.step(self.memory, self.now)
    }

    fn later(&mut self, by: Duration) -> Vec<Action> {
        self.now += by;
        self.step()
    }

    /// All that was told, with each application doing as it is told at once, until it comes to
    /// rest.
    fn settle(&mut self) -> Vec<(usize, Order)> {
        let mut told = Vec::new();
        loop {
            let actions = self.later(TICK);
            if actions.is_empty() {
                return told;
            }
            for action in actions {
                if let Action::Tell { application, order } = action {
                    self.governor.settled(application, order.number);
                    told.push((application, order));
                }
            }
        }
    }
}

/// The application, the limit and the reason of what was told.
fn told(actions: &[Action]) -> Vec<(usize, u64, Reason)> {
    let told = |action: &Action| match action {
        Action::Tell { application, order } => {
            Some((*application, order.limit_bytes, order.reason))
        }
        Action::Answer(_) => None,
    };
    actions.iter().filter_map(told).collect()
}

fn answers(actions: &[Action]) -> Vec<(u64, Vec<String>)> {
    let answer = |action: &Action| match action {
        Action::Answer(GuestMessage::Ready { id, late, .. }) => Some((*id, late.clone())),
        _ => None,
    };
    actions.iter().filter_map(answer).collect()
}

#[test]
fn applications_give_back_one_after_the_other_and_then_the_host_is_answered() {
    let bounds = vec![application("a", G, u64::MAX, false), application("b", G, 4 * G, false)];
    let mut run = Run::new(settings(), bounds, memory(9 * G, 0));
    let first = run.settle();
    let limits: Vec<_> = first.iter().map(|(at, order)| (*at, order.limit_bytes)).collect();
    assert_eq!(limits, [(0, 4 * G), (1, 4 * G)]);

    // The host counts 10 GiB where the kernel counts 9.
    run.hear(HostMessage::Target { id: 7, size_bytes: 10 * G, target_bytes: 5 * G });
    let actions = run.step();
    assert_eq!(told(&actions), [(0, G, Reason::Shrink)]);
    assert_eq!(run.later(TICK), [], "the second waits for the first");
    let is_under_way = |run: &Run| run.governor.announced().expect("a size").is_under_way;
    assert!(!is_under_way(&run), "nobody has given anything");
    run.governor.settled(0, 2);
    assert!(is_under_way(&run));
    assert_eq!(told(&run.later(TICK)), [(1, 2 * G, Reason::Shrink)]);
    run.governor.settled(1, 2);
    assert_eq!(run.later(TICK), [], "what they gave is not available yet");
    run.memory.available_bytes = 5 * G;
    assert_eq!(answers(&run.later(TICK)), [(7, vec![])]);
    assert_eq!(run.later(TICK), [], "once");

    // The batches; nothing changes for applications.
    for total in [8 * G, 7 * G, 6 * G, 5 * G, 4 * G] {
        run.memory = memory(total, total - 3 * G);
        assert_eq!(run.later(TICK), [], "{total}");
    }
    assert_eq!(run.governor.state(0, &["", ""], run.now).target, None, "it is there");
    run.memory = memory(5 * G, 2 * G);
    assert_eq!(told(&run.later(TICK)), [(1, 3 * G, Reason::Grow)]);
}

#[test]
fn the_last_blocks_of_a_machine_that_shrinks_are_nobodys_to_grow_by() {
    let bounds = vec![application("a", 0, u64::MAX, false)];
    let mut run = Run::new(settings(), bounds, memory(8 * G, 8 * G));
    run.settle();
    run.hear(HostMessage::Target { id: 1, size_bytes: 8 * G, target_bytes: 4 * G });
    let shrunk: Vec<_> =
        run.settle().iter().map(|(_, order)| (order.limit_bytes, order.reason)).collect();
    assert_eq!(shrunk, [(3 * G, Reason::Shrink)]);
    for mib_left in [4, 2, 0] {
        run.memory = memory(4 * G + (mib_left << 20), 4 * G);
        assert_eq!(run.later(TICK), [], "{mib_left} MiB are on their way");
        assert_eq!(run.governor.state(0, &["api"], run.now).target, None, "it is there");
    }
    // The host says nothing before a machine grows, if an agent follows one that was killed.
    run.memory = memory(5 * G, 5 * G);
    assert_eq!(told(&run.later(TICK)), [(0, 4 * G, Reason::Grow)]);
}

#[test]
fn a_size_that_is_told_in_the_middle_of_shrinking_asks_for_no_more_than_it_says() {
    let bounds = vec![application("a", 0, u64::MAX, false)];
    let mut run = Run::new(settings(), bounds, memory(9 * G, 9 * G));
    run.settle();
    run.now += Duration::from_secs(5);
    run.hear(HostMessage::Target { id: 1, size_bytes: 10 * G, target_bytes: 8 * G });
    let limits = |run: &mut Run| -> Vec<u64> {
        run.settle().iter().map(|(_, order)| order.limit_bytes).collect()
    };
    assert_eq!(limits(&mut run), [6 * G]);
    // The host has not read the size since.
    run.memory.total_bytes = 8 * G;
    run.hear(HostMessage::Target { id: 2, size_bytes: 10 * G, target_bytes: 6 * G });
    assert_eq!(limits(&mut run), [4 * G]);
}

#[test]
fn who_does_not_give_in_time_is_named_and_holds_up_nobody() {
    let bounds = vec![application("a", 0, u64::MAX, false), application("b", G, 4 * G, false)];
    let mut run = Run::new(settings(), bounds, memory(9 * G, 0));
    run.settle();
    run.hear(HostMessage::Target { id: 1, size_bytes: 9 * G, target_bytes: 3 * G });
    assert_eq!(told(&run.step()), [(0, 0, Reason::Shrink)]);
    assert!(!run.governor.announced().expect("a size").is_under_way);
    assert_eq!(told(&run.later(PATIENCE)), [(1, 2 * G, Reason::Shrink)]);
    assert!(run.governor.announced().expect("a size").is_under_way, "it has had its time");
    run.governor.failed(1, 2, "no".into());
    run.later(PATIENCE);
    let answered = answers(&run.later(PATIENCE));
    assert_eq!(answered, [(1, vec!["a".into(), "b".into()])], "though nothing is available");
    let state = run.governor.state(0, &["", ""], run.now);
    assert!(state.applications.iter().all(|one| one.status == ApplicationStatus::Late));
    assert_eq!(state.applications[1].failure.as_deref(), Some("no"));
    run.governor.settled(1, 2);
    let state = run.governor.state(0, &["", ""], run.now);
    assert_eq!(state.applications[1].status, ApplicationStatus::Settled, "later than never");
    assert_eq!(state.applications[1].failure, None);
}

#[test]
fn an_eviction_is_told_to_who_wants_to_know_and_lifted() {
    let bounds = vec![
        application("a", 0, u64::MAX, true),
        application("b", G, G, false),
        application("c", G, G, true),
    ];
    let mut run = Run::new(settings(), bounds, memory(9 * G, 9 * G));
    run.settle();
    run.hear(HostMessage::Evict { id: 3, within_ms: 30_000 });
    let actions = run.step();
    assert_eq!(told(&actions), [(0, 6 * G, Reason::Eviction)]);
    let Action::Tell { order, .. } = &actions[0] else { panic!("{actions:?}") };
    assert_eq!(order.within, Duration::from_secs(30));
    run.governor.settled(0, 2);
    let actions = run.later(TICK);
    assert_eq!(told(&actions), [(2, G, Reason::Eviction)]);
    run.governor.settled(2, 2);
    assert_eq!(answers(&run.later(TICK)), [(3, vec![])]);
    let eviction = run.governor.state(0, &["", "", ""], run.now).eviction.expect("there is one");
    assert_eq!((eviction.id, eviction.left_ms, eviction.is_answered), (3, 29_500, true));

    run.hear(HostMessage::Cancelled { what: Notice::Evict });
    let spared = run.settle();
    let spared: Vec<_> = spared.iter().map(|(at, order)| (*at, order.reason)).collect();
    assert_eq!(spared, [(2, Reason::Spared), (0, Reason::Spared)]);

    run.hear(HostMessage::Evict { id: 4, within_ms: 30_000 });
    run.settle();
    run.later(Duration::from_secs(120));
    let state = run.governor.state(0, &["", "", ""], run.now);
    assert_eq!(state.eviction, None, "who announced it is gone");
}

#[test]
fn what_an_overtaken_order_said_is_said_by_the_next() {
    let mut run =
        Run::new(settings(), vec![application("a", 0, u64::MAX, true)], memory(9 * G, 9 * G));
    assert_eq!(told(&run.step()), [(0, 8 * G, Reason::Start)]);
    run.memory = memory(8 * G, 8 * G);
    assert_eq!(told(&run.later(TICK)), [(0, 7 * G, Reason::Start)]);
    run.settle();
    run.governor.settled(0, 2);

    // It is doomed, and before it has heard so the machine shrinks as well.
    run.hear(HostMessage::Evict { id: 3, within_ms: 30_000 });
    assert_eq!(told(&run.step()), [(0, 7 * G, Reason::Eviction)]);
    run.memory = memory(7 * G, 7 * G);
    assert_eq!(told(&run.later(TICK)), [(0, 6 * G, Reason::Eviction)]);
    run.governor.settled(0, 4);
    run.memory = memory(6 * G, 6 * G);
    assert_eq!(told(&run.later(TICK)), [(0, 5 * G, Reason::Shrink)], "it knows");
    run.settle();

    run.hear(HostMessage::Cancelled { what: Notice::Evict });
    let limits = told(&run.later(PATIENCE));
    assert_eq!(limits, [(0, 5 * G, Reason::Spared)]);
    run.memory = memory(9 * G, 9 * G);
    assert_eq!(told(&run.later(TICK)), [(0, 8 * G, Reason::Spared)]);
}

#[test]
fn without_a_word_of_the_host_the_memory_is_watched() {
    let bounds = vec![application("a", G, u64::MAX, false)];
    let settings = Settings { free_bytes: G / 2, ..settings() };
    let mut run = Run::new(settings, bounds, memory(9 * G, 2 * G));
    run.settle();
    run.memory = memory(7 * G, 2 * G);
    assert_eq!(told(&run.later(TICK)), [(0, 6 * G, Reason::Shrink)]);
    run.governor.settled(0, 2);
    run.later(TICK);
    // The size is as it was, and somebody who is not listed takes memory.
    run.memory.available_bytes = G / 4;
    assert_eq!(run.later(TICK), [], "it may take a moment to be available");
    run.later(Duration::from_secs(2));
    assert_eq!(told(&run.later(TICK)), [(0, 6 * G - G / 4, Reason::Shrink)]);
    run.governor.settled(0, 3);
    run.memory.available_bytes = 2 * G;
    run.later(TICK);
    assert_eq!(run.later(Duration::from_secs(1)), [], "not at once");
    run.later(Duration::from_secs(31));
    assert_eq!(told(&run.later(TICK)), [(0, 6 * G, Reason::Grow)]);
}

#[test]
fn what_applications_cannot_use_is_not_taken_from_them_first() {
    let bounds = vec![application("a", G, 2 * G, false)];
    let settings = Settings { free_bytes: G / 2, ..settings() };
    let mut run = Run::new(settings, bounds, memory(64 * G, G / 4));
    run.settle();
    run.later(Duration::from_secs(2));
    assert_eq!(told(&run.later(TICK)), [(0, 2 * G - G / 4, Reason::Shrink)], "what is missing");
    run.governor.settled(0, 2);
    assert_eq!(run.governor.state(0, &[""], run.now).squeezed_bytes, G / 4);
}

#[test]
fn a_target_that_is_never_reached_is_forgotten_and_a_cancelled_one_at_once() {
    let bounds = vec![application("a", 0, u64::MAX, false)];
    let mut run = Run::new(settings(), bounds, memory(9 * G, 9 * G));
    run.settle();
    for (id, cancelled) in [(1, true), (2, false)] {
        run.hear(HostMessage::Target { id, size_bytes: 9 * G, target_bytes: 5 * G });
        assert_eq!(run.settle()[0].1.limit_bytes, 4 * G);
        match cancelled {
            true => run.hear(HostMessage::Cancelled { what: Notice::Target }),
            false => run.now += Duration::from_secs(600),
        }
        assert_eq!(run.settle()[0].1.limit_bytes, 8 * G);
    }
}

/// Something that happens.
#[derive(Clone, Debug)]
enum Event {
    Memory {
        total: u64,
        available: u64,
    },
    Target {
        size: u64,
        target: u64,
    },
    Evict {
        within_ms: u64,
    },
    Cancelled(Notice),
    /// The application says that it has done what it was told last, or that it cannot.
    Settled(usize),
    Failed(usize),
    Time {
        ms: u64,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let bytes = || 0u64..64 * G;
    prop_oneof![
        (bytes(), bytes())
            .prop_map(|(a, b)| Event::Memory { total: a.max(b), available: a.min(b) }),
        (bytes(), bytes()).prop_map(|(size, target)| Event::Target { size, target }),
        (0u64..60_000).prop_map(|within_ms| Event::Evict { within_ms }),
        prop_oneof![Just(Notice::Target), Just(Notice::Evict)].prop_map(Event::Cancelled),
        (0usize..4).prop_map(Event::Settled),
        (0usize..4).prop_map(Event::Failed),
        (0u64..10_000).prop_map(|ms| Event::Time { ms }),
    ]
}

fn bounds() -> impl Strategy<Value = Vec<Bounds>> {
    let one = (0u64..16 * G, 0u64..16 * G, any::<bool>())
        .prop_map(|(a, b, hears)| application("x", a.min(b), a.max(b), hears));
    prop::collection::vec(one, 1..5)
}

proptest! {
    #[test]
    fn whatever_happens_the_rules_hold_and_it_comes_to_rest(
        bounds in bounds(),
        free_bytes in 0u64..8 * G,
        events in prop::collection::vec(event(), 0..60),
    ) {
        let count = bounds.len();
        let settings = Settings { free_bytes, ..settings() };
        let mut run = Run::new(settings, bounds.clone(), memory(8 * G, G));
        let mut next_id = 0;
        let mut answered = BTreeSet::new();
        let mut latest = vec![0u64; count];
        let kinds = vec![""; count];
        let mut check = |run: &mut Run, next_id: u64| -> Result<bool, TestCaseError> {
            let squeezed = run.governor.state(0, &kinds, run.now).squeezed_bytes;
            let actions = run.step();
            for action in &actions {
                match action {
                    Action::Tell { application, order } => {
                        let one = &bounds[*application];
                        prop_assert!((one.min_bytes..=one.max_bytes).contains(&order.limit_bytes));
                        prop_assert_eq!(order.number, latest[*application] + 1);
                        latest[*application] = order.number;
                    }
                    Action::Answer(GuestMessage::Ready { id, .. }) => {
                        prop_assert!(*id < next_id && answered.insert(*id), "{id} was answered");
                    }
                    Action::Answer(other) => prop_assert!(false, "{other:?} is not the governor's"),
                }
            }
            let state = run.governor.state(0, &kinds, run.now);
            let drains = |one: &&hecaton_guest::ApplicationState| one.status == ApplicationStatus::Draining;
            let draining = state.applications.iter().filter(drains).count();
            prop_assert!(draining <= 1, "one gives back at a time");
            // Only who gives back himself is told while somebody does, or who begins to.
            if draining == 1 {
                prop_assert!(told(&actions).len() <= 1, "{actions:?}");
            } else if state.squeezed_bytes == squeezed {
                // Otherwise it is told in the next step.
                let budget = state.target.map_or(run.memory.total_bytes, |target| target.total_bytes);
                let usable = bounds.iter().map(|one| one.max_bytes).sum();
                let budget = budget.saturating_sub(G).min(usable).saturating_sub(state.squeezed_bytes);
                let most = limits(budget, &bounds);
                let is_late = state.applications.iter().any(|one| one.status == ApplicationStatus::Late);
                let are_told = state.applications.iter().zip(&most).all(|(one, most)| one.limit_bytes >= *most);
                prop_assert!(are_told || is_late, "nobody has less than it may");
            }
            Ok(!actions.is_empty())
        };
        for event in events {
            match event {
                Event::Memory { total, available } => run.memory = memory(total, available),
                Event::Target { size, target } => {
                    run.hear(HostMessage::Target { id: next_id, size_bytes: size, target_bytes: target });
                    next_id += 1;
                }
                Event::Evict { within_ms } => {
                    run.hear(HostMessage::Evict { id: next_id, within_ms });
                    next_id += 1;
                }
                Event::Cancelled(what) => run.hear(HostMessage::Cancelled { what }),
                Event::Settled(at) => {
                    let orders = run.governor.state(0, &kinds, run.now).applications;
                    if let Some(one) = orders.get(at) {
                        run.governor.settled(at, one.order);
                    }
                }
                Event::Failed(at) => {
                    let orders = run.governor.state(0, &kinds, run.now).applications;
                    if let Some(one) = orders.get(at) {
                        run.governor.failed(at, one.order, "no".into());
                    }
                }
                Event::Time { ms } => run.now += Duration::from_millis(ms),
            }
            check(&mut run, next_id)?;
        }
        // Nobody says anything any more: what is in force is answered within everybody's time and
        // once more.
        let within = PATIENCE * u32::try_from(count + 2).unwrap();
        let until = run.now + within;
        while run.now < until {
            run.now += TICK;
            check(&mut run, next_id)?;
        }
        let state = run.governor.state(0, &kinds, run.now);
        prop_assert!(state.target.is_none_or(|target| target.is_answered));
        // And then there is nothing more to do, once all is taken from them that can be, if too
        // little is available and none of them ever says that it has given anything, or all of it
        // is theirs again.
        run.now += Duration::from_secs(3600);
        let shares = bounds.iter().map(|one| one.max_bytes - one.min_bytes).sum::<u64>();
        let orders = shares.div_ceil(64 << 20) + 2 * count as u64;
        let (mut last, mut busy) = (run.now, 0);
        // Taking 64 MiB takes 10 s, giving them back 30.
        for _ in 0..9 * orders + 200 {
            run.now += Duration::from_secs(5);
            if check(&mut run, next_id)? {
                last = run.now;
                busy += 1;
            }
        }
        prop_assert!(busy <= 2 * orders + 8, "{busy} steps to take {orders} times and to give back");
        prop_assert!(run.now - last > Duration::from_secs(600), "it rests");
    }
}
