//! All orders of events in small clusters: no page has two owners, and nobody waits for ever.
//!
//! Starts from a cluster that has formed, and tries every event. A message arrives, a node sends
//! statistics, or the manager moves pages. A node uses its pages, leaves, crashes, starts again,
//! joins again or is given up by mistake, as often as a budget allows. States that were seen before
//! are not explored again.

use hecaton_policy::cluster::grants::Forward;
use hecaton_policy::cluster::member::{Member, Phase};
use hecaton_policy::cluster::membership::{Membership, NodeState};
use hecaton_policy::cluster::message::{Block, Holdings, Outgoing, ToManager, ToNode};
use hecaton_policy::cluster::{Home, NodeId};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

/// More would mean that the budgets are not what they were thought to be.
const MOST_STATES: usize = 20_000_000;

const MANAGER: NodeId = NodeId(0);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Letter {
    Up(ToManager),
    Down(ToNode),
    Grant(Vec<Block>),
}

/// How often each thing may yet happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Budget {
    moves: u8,
    uses: u8,
    leaves: u8,
    stays: u8,
    silences: u8,
    crashes: u8,
    joins: u8,
    mistakes: u8,
    manager_restarts: u8,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    manager: Membership,
    nodes: BTreeMap<NodeId, Option<Member>>,
    links: BTreeMap<(NodeId, NodeId), VecDeque<Letter>>,
    said: BTreeMap<NodeId, Holdings>,
    lives: BTreeMap<NodeId, u64>,
    budget: Budget,
    /// Whether pages may have been lost with a node.
    may_lack: bool,
}

impl World {
    fn formed(nodes: u32, pages: u64, budget: Budget) -> World {
        let mut world = World {
            manager: Membership::default(),
            nodes: BTreeMap::new(),
            links: BTreeMap::new(),
            said: BTreeMap::new(),
            lives: BTreeMap::new(),
            budget,
            may_lack: false,
        };
        for id in (1..=nodes).map(NodeId) {
            let (member, out) = Member::start(id, 1, pages);
            world.nodes.insert(id, Some(member));
            world.lives.insert(id, 1);
            world.send(id, out);
        }
        world.at_rest()
    }

    /// After all that happens by itself, in one order of many.
    fn at_rest(self) -> World {
        let mut world = self;
        while let Some(next) = world.inevitable().into_iter().next() {
            world = next;
        }
        world
    }

    fn send(&mut self, from: NodeId, out: Vec<Outgoing>) {
        for out in out {
            let (to, letter) = match out {
                Outgoing::Manager(message) => (MANAGER, Letter::Up(message)),
                Outgoing::Grant { to, blocks } => (to, Letter::Grant(blocks)),
            };
            self.links.entry((from, to)).or_default().push_back(letter);
        }
    }

    fn send_down(&mut self, sends: Vec<(NodeId, ToNode)>) {
        for (to, message) in sends {
            self.links.entry((MANAGER, to)).or_default().push_back(Letter::Down(message));
        }
    }

    fn with_node(&self, id: NodeId, act: impl FnOnce(&mut Member) -> Vec<Outgoing>) -> World {
        let mut next = self.clone();
        if let Some(Some(member)) = next.nodes.get_mut(&id) {
            let out = act(member);
            next.send(id, out);
        }
        next
    }

    fn deliver(&self, link: (NodeId, NodeId)) -> World {
        let mut next = self.clone();
        let queue = next.links.get_mut(&link).unwrap();
        let letter = queue.pop_front().unwrap();
        if queue.is_empty() {
            next.links.remove(&link);
        }
        let (from, to) = link;
        match letter {
            Letter::Up(message) => {
                let sends = next.manager.handle(from, message);
                next.send_down(sends);
            }
            Letter::Down(message) => {
                if let Some(Some(member)) = next.nodes.get_mut(&to) {
                    let out = member.handle(&message);
                    next.send(to, out);
                }
            }
            Letter::Grant(blocks) => match next.nodes.get_mut(&to) {
                Some(Some(member)) => {
                    let out = member.receive(&blocks);
                    next.send(to, out);
                }
                _ => next.may_lack = true,
            },
        }
        next
    }

    fn up(&self) -> impl Iterator<Item = (NodeId, &Member)> {
        self.nodes.iter().filter_map(|(&id, member)| Some((id, member.as_ref()?)))
    }

    /// Events that happen sooner or later: messages arrive, nodes send statistics and make room,
    /// and the manager gives up nodes that are down.
    fn inevitable(&self) -> Vec<World> {
        let mut next: Vec<World> = self.links.keys().map(|&link| self.deliver(link)).collect();
        for (id, member) in self.up() {
            let holdings = member.holdings();
            let takes_part = matches!(member.phase(), Phase::Active | Phase::Leaving);
            let on_its_way = self.links.get(&(id, MANAGER)).is_some_and(|queue| {
                queue.iter().any(|letter| matches!(letter, Letter::Up(ToManager::Statistics(_))))
            });
            if takes_part && !on_its_way && self.said.get(&id) != Some(&holdings) {
                let mut told = self.with_node(id, |member| {
                    vec![Outgoing::Manager(ToManager::Statistics(member.end_period(0)))]
                });
                told.said.insert(id, holdings);
                next.push(told);
            }
            if member.excess_pages() > 0 {
                next.push(self.with_node(id, |member| {
                    let all: u64 = member.holdings().owned.iter().map(|block| block.pages).sum();
                    let used = member.usable_pages().min(all);
                    member.set_used(used)
                }));
            }
        }
        for (&id, member) in &self.nodes {
            let state = self.manager.state(id);
            if member.is_none() && matches!(state, NodeState::Active | NodeState::Leaving) {
                let mut given_up = self.clone();
                let sends = given_up.manager.lost(id);
                given_up.send_down(sends);
                next.push(given_up);
            }
        }
        next
    }

    /// Events that may happen while the budget lasts.
    fn possible(&self) -> Vec<World> {
        let mut next = Vec::new();
        let mut spend = |take: fn(&mut Budget) -> &mut u8, mut world: World| {
            if *take(&mut world.budget) > 0 {
                *take(&mut world.budget) -= 1;
                next.push(world);
            }
        };
        let ids: Vec<NodeId> = self.nodes.keys().copied().collect();
        for &id in &ids {
            for &to in ids.iter().filter(|to| **to != id) {
                let mut moved = self.clone();
                let sends = moved.manager.forward(&[Forward { from: id, to, pages: 1 }]);
                if !sends.is_empty() {
                    moved.send_down(sends);
                    spend(|budget| &mut budget.moves, moved);
                }
            }
            let Some(member) = &self.nodes[&id] else {
                let mut back = self.clone();
                let life = back.lives[&id] + 1;
                back.lives.insert(id, life);
                back.said.remove(&id);
                let (member, out) = Member::start_after_crash(id, life, 1);
                back.nodes.insert(id, Some(member));
                back.send(id, out);
                next_life_free(&mut spend, back);
                continue;
            };
            if member.free_pages() > 0 {
                let used = member.usable_pages();
                spend(
                    |budget| &mut budget.uses,
                    self.with_node(id, |member| member.set_used(used)),
                );
            }
            if member.phase() == Phase::Active {
                let mut left = self.with_node(id, Member::leave);
                // Statistics are sent each second, changed or not.
                left.said.remove(&id);
                spend(|budget| &mut budget.leaves, left);
            }
            if member.phase() == Phase::Leaving {
                let stayed = self.with_node(id, Member::stay);
                spend(|budget| &mut budget.stays, stayed);
            }
            let mut silent = self.clone();
            let sends = silent.manager.excuse(id);
            silent.send_down(sends);
            spend(|budget| &mut budget.silences, silent);
            if member.phase() == Phase::Inactive {
                let mut joined = self.clone();
                let life = joined.lives[&id] + 1;
                joined.lives.insert(id, life);
                spend(
                    |budget| &mut budget.joins,
                    joined.with_node(id, |member| member.register(life)),
                );
            }
            let mut crashed = self.clone();
            let life = crashed.lives[&id].max(member.life());
            crashed.lives.insert(id, life);
            crashed.nodes.insert(id, None);
            crashed.links.retain(|&(_, to), _| to != id);
            crashed.may_lack = true;
            spend(|budget| &mut budget.crashes, crashed);
            if matches!(self.manager.state(id), NodeState::Active | NodeState::Leaving) {
                let mut mistaken = self.clone();
                let sends = mistaken.manager.lost(id);
                mistaken.send_down(sends);
                mistaken.said.remove(&id);
                mistaken.may_lack = true;
                spend(|budget| &mut budget.mistakes, mistaken);
            }
        }
        let mut restarted = self.clone();
        restarted.manager = Membership::default();
        restarted.links.retain(|&(from, to), _| from != MANAGER && to != MANAGER);
        restarted.said.clear();
        for id in ids {
            restarted = restarted.with_node(id, Member::reconnected);
        }
        spend(|budget| &mut budget.manager_restarts, restarted);
        next
    }

    /// Pages of a home that somebody owns, or that are on their way.
    fn accounted(&self, home: Home) -> u64 {
        let at_home = |block: &&Block| block.home == home;
        let owned: u64 = self
            .up()
            .map(|(_, member)| {
                let owned = member.holdings().owned;
                owned.iter().filter(at_home).map(|block| block.pages).sum::<u64>()
            })
            .sum();
        let letters = self.links.values().flatten();
        let under_way: u64 = letters
            .map(|letter| match letter {
                Letter::Grant(blocks) => blocks.iter().filter(at_home).map(|b| b.pages).sum(),
                _ => 0,
            })
            .sum();
        owned + under_way
    }

    fn check(&self) {
        for (id, member) in self.up() {
            let holdings = member.holdings();
            let home = Home { node: id, life: holdings.life };
            let accounted = self.accounted(home);
            assert!(accounted <= holdings.home_pages, "a page of {id:?} has two owners");
            if !self.may_lack && member.phase() == Phase::Active {
                assert_eq!(accounted, holdings.home_pages, "a page of {id:?} is lost");
            }
        }
    }

    /// Nothing is left that would happen by itself.
    fn check_rest(&self) {
        for (id, member) in self.up() {
            assert!(
                matches!(member.phase(), Phase::Active | Phase::Inactive),
                "{id:?} waits for ever, {:?}, the manager has it {:?}",
                member.phase(),
                self.manager.state(id),
            );
            let state = self.manager.state(id);
            let expected = match member.phase() {
                Phase::Active => NodeState::Active,
                _ => NodeState::Inactive,
            };
            assert_eq!(state, expected, "{id:?}");
        }
    }
}

/// Starting again costs no budget: whoever may crash may come back.
fn next_life_free(spend: &mut impl FnMut(fn(&mut Budget) -> &mut u8, World), mut world: World) {
    world.budget.joins += 1;
    spend(|budget| &mut budget.joins, world);
}

/// Moves that are explored. `HECATON_EXPLORE=N` adds N to each test's: one more takes about ten
/// times as long.
fn with_more_moves(budget: Budget) -> Budget {
    let more = std::env::var("HECATON_EXPLORE").ok().and_then(|more| more.parse::<u8>().ok());
    Budget { moves: budget.moves + more.unwrap_or(0), ..budget }
}

fn explore(nodes: u32, pages: u64, budget: Budget) {
    let budget = with_more_moves(budget);
    let hash = |world: &World| {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        hasher.finish()
    };
    let start = World::formed(nodes, pages, budget);
    let mut seen = HashSet::from([hash(&start)]);
    let mut open = vec![start];
    let mut at_rest = 0;
    while let Some(world) = open.pop() {
        world.check();
        let inevitable = world.inevitable();
        if inevitable.is_empty() {
            world.check_rest();
            at_rest += 1;
        }
        for next in inevitable.into_iter().chain(world.possible()) {
            if seen.insert(hash(&next)) {
                open.push(next);
            }
        }
        assert!(seen.len() < MOST_STATES, "the budget is too large to be explored");
    }
    assert!(at_rest > 0);
    println!("{} states, {at_rest} at rest", seen.len());
}

const NOTHING: Budget = Budget {
    moves: 0,
    uses: 0,
    leaves: 0,
    stays: 0,
    silences: 0,
    crashes: 0,
    joins: 0,
    mistakes: 0,
    manager_restarts: 0,
};

#[test]
fn a_node_leaves_while_pages_change_places() {
    explore(2, 1, Budget { moves: 2, uses: 1, leaves: 1, ..NOTHING });
}

#[test]
fn a_node_leaves_and_joins_again() {
    explore(2, 1, Budget { moves: 1, uses: 1, leaves: 1, joins: 1, ..NOTHING });
}

#[test]
fn a_node_thinks_better_of_leaving() {
    explore(2, 1, Budget { moves: 1, uses: 1, leaves: 1, stays: 1, ..NOTHING });
}

#[test]
fn a_node_thinks_better_of_leaving_while_the_manager_restarts() {
    explore(2, 1, Budget { leaves: 1, stays: 1, manager_restarts: 1, ..NOTHING });
}

#[test]
fn who_recovers_does_not_wait_for_who_is_silent() {
    explore(2, 1, Budget { moves: 1, uses: 1, crashes: 1, silences: 1, ..NOTHING });
}

#[test]
fn who_has_ended_is_not_waited_for() {
    let mut world = World::formed(3, 1, NOTHING);
    let sends = world.manager.handle(NodeId(1), ToManager::LeaveReq);
    assert_eq!(sends.len(), 2, "both others are to confirm");
    let member = world.nodes[&NodeId(1)].as_ref().expect("it is up");
    let itself = ToManager::Statistics(member.holdings());
    assert!(world.manager.handle(NodeId(1), itself).is_empty(), "it owns nothing of others");
    assert!(world.manager.forget(NodeId(2)).is_empty());
    assert_eq!(world.manager.forget(NodeId(3)), [(NodeId(1), ToNode::LeaveNotify)]);
    assert_eq!(world.manager.state(NodeId(1)), NodeState::Inactive);
    assert_eq!(world.manager.life(NodeId(3)), None);
}

#[test]
fn pages_that_a_failed_node_had_of_others_are_counted() {
    let mut world = World::formed(2, 3, NOTHING);
    let sends = world.manager.forward(&[Forward { from: NodeId(1), to: NodeId(2), pages: 2 }]);
    world.send_down(sends);
    let mut world = world.at_rest();
    assert_eq!(world.manager.lost_pages(NodeId(1)), 0);
    world.nodes.insert(NodeId(2), None);
    let world = world.at_rest();
    assert_eq!(world.manager.state(NodeId(2)), NodeState::Recovery);
    assert_eq!(world.manager.lost_pages(NodeId(1)), 2);
}

#[test]
fn a_node_leaves_among_three() {
    explore(3, 1, Budget { moves: 1, leaves: 1, ..NOTHING });
}

#[test]
fn a_node_crashes_and_comes_back() {
    explore(2, 1, Budget { moves: 1, uses: 1, crashes: 1, ..NOTHING });
}

#[test]
fn a_node_crashes_while_another_leaves() {
    explore(2, 1, Budget { moves: 1, leaves: 1, crashes: 1, ..NOTHING });
}

#[test]
fn a_node_is_given_up_by_mistake() {
    explore(2, 1, Budget { moves: 1, uses: 1, mistakes: 1, ..NOTHING });
}

#[test]
fn the_manager_restarts_while_pages_move() {
    explore(2, 1, Budget { moves: 1, manager_restarts: 1, ..NOTHING });
}

#[test]
fn the_manager_restarts_while_a_node_leaves() {
    explore(2, 1, Budget { uses: 1, leaves: 1, manager_restarts: 1, ..NOTHING });
}
