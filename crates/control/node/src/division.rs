//! How a node divides what it may use of the pool among its consumers and its volumes with a spill
//! file, once a second: the first level of the cluster's policy
//! ([`hecaton_policy::cluster::targets`]).
//!
//! The manager says which policy there is, and the node's quota; both stay in force while no
//! manager answers, and the policy also while the manager names one that this version does not
//! know. Pagers hear of their targets with the answers to their statistics. Everything is counted
//! in pages of donors' memory: a page in two copies is two. A target is in pages of the consumer
//! again.
//!
//! Pure: it is told what consumers count, and when a second is over.

use crate::cluster::report::{NodeReport, PoolShare};
use crate::donors::DonorReport;
use crate::pagers::ConsumerReport;
use crate::volumes::VolumeReport;
use hecaton_memory::{PAGE_SIZE, SpaceId};
use hecaton_policy::cluster::ConsumerId;
use hecaton_policy::cluster::account::ConsumerStatistics;
use hecaton_policy::cluster::choice::Named;
use hecaton_policy::cluster::targets::{Decision, FirstLevel, Situation};
use std::collections::BTreeMap;

/// The policy in force at a node, and the node's decisions by it.
#[derive(Debug, Default)]
pub(crate) struct Division {
    /// A manager has said whether there is a policy.
    is_told: bool,
    quota_pages: Option<u64>,
    first_level: Option<FirstLevel>,
    known: BTreeMap<Who, Known>,
    share: PoolShare,
}

/// Consumer that pages are accounted to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    /// A program or a machine, by its name as a consumer.
    Paged(String),
    /// A volume with a spill file.
    Volume(String),
}

/// A consumer or volume when it was last looked at.
#[derive(Debug)]
struct Known {
    space: SpaceId,
    counted: Counted,
    /// Target that the policy decided, in pages of donors' memory; `None`: no target of its own.
    decided: Option<u64>,
    word: Word,
}

/// The node's message to a consumer or volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Word {
    /// Bytes of its pages that it may hold; nothing limits it if there are none.
    pub(crate) target_bytes: Option<u64>,
    /// Bytes beyond the target that must move elsewhere; only idle ones move.
    pub(crate) take_back_bytes: u64,
}

/// One that the policy decides on, as it says itself.
struct Party {
    who: Who,
    space: SpaceId,
    used_pages: u64,
    copies: u64,
    counted: Counted,
}

/// Total counts of a pager or volume.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    puts: u64,
    puts_succeeded: u64,
    gets: u64,
}

impl Division {
    /// Takes a manager's word. Returns the policy if it is one that this version does not know,
    /// once.
    pub(crate) fn follow<'a>(
        &mut self,
        policy: Option<&'a Named>,
        quota_pages: Option<u64>,
    ) -> Option<&'a Named> {
        let was_unknown = self.share.is_policy_unknown;
        if let Some(unknown @ Named::Unknown { .. }) = policy {
            self.share.is_policy_unknown = true;
            self.hear_quota(quota_pages);
            return (!was_unknown).then_some(unknown);
        }
        let policy = policy.and_then(Named::known);
        if self.share.policy != policy || !self.is_told || was_unknown {
            // Targets of another policy are nothing to start from. The quota is: a manager that has
            // started anew with that policy knows it from nobody else.
            self.known.clear();
            self.first_level = policy.map(|choice| FirstLevel::new(choice.policy()));
            self.share = PoolShare { policy, ..PoolShare::default() };
        }
        self.is_told = true;
        self.hear_quota(quota_pages);
        None
    }

    /// A manager that has started anew listens for some seconds before it says one.
    fn hear_quota(&mut self, quota_pages: Option<u64>) {
        let has_policy = self.share.policy.is_some();
        self.quota_pages = quota_pages.or(self.quota_pages).filter(|_| has_policy);
        self.share.quota_pages = self.quota_pages;
    }

    /// The policy that it divides by, for people.
    pub(crate) fn policy_in_words(&self) -> String {
        self.share.policy.map_or_else(|| "none".to_owned(), |policy| policy.to_string())
    }

    /// The report to the manager.
    pub(crate) fn share(&self) -> PoolShare {
        self.share
    }

    /// The message to a pager. `None`: the message before stays in force.
    pub(crate) fn word_for(&self, consumer: &str) -> Option<Word> {
        self.word(&Who::Paged(consumer.to_owned()))
    }

    /// The message to a volume with a spill file; `None` as in [`Self::word_for`].
    pub(crate) fn word_for_volume(&self, volume: &str) -> Option<Word> {
        self.word(&Who::Volume(volume.to_owned()))
    }

    fn word(&self, who: &Who) -> Option<Word> {
        match self.share.policy {
            None => self.is_told.then(Word::default),
            Some(_) => self.known.get(who).map(|known| known.word),
        }
    }

    /// A second is over.
    pub(crate) fn decide(
        &mut self,
        donors: &[DonorReport],
        consumers: &[ConsumerReport],
        volumes: &[VolumeReport],
    ) {
        // Volumes without a spill file come first: they cannot give pages back, and have no other
        // place to write to.
        let apart = volumes.iter().filter(|volume| volume.spill.is_none());
        let apart: u64 = apart.filter_map(Party::of_volume).map(|party| party.used_pages).sum();
        let spilling = volumes.iter().filter(|volume| volume.spill.is_some());
        let parties = consumers.iter().filter_map(Party::of_consumer);
        let parties: Vec<Party> = parties.chain(spilling.filter_map(Party::of_volume)).collect();
        let used: u64 = parties.iter().map(|party| party.used_pages).sum();
        let Some(first_level) = &mut self.first_level else {
            if self.share.is_policy_unknown {
                // The manager gives nobody else what is used here.
                self.share.used_pages = used + apart;
                self.share.wanted_pages = used + apart;
            }
            return;
        };
        let quota = self.quota_pages.unwrap_or_else(|| NodeReport::home_pages(donors));
        let statistics: Vec<ConsumerStatistics> =
            parties.iter().map(|party| party.statistics(self.known.get(&party.who))).collect();
        let total_pages = quota.saturating_sub(apart);
        let situation = Situation { total_pages, owed_pages: 0, consumers: &statistics };
        let mut decision = Decision::default();
        first_level.decide(&situation, &mut decision);
        // First come, first served, among those without a target: what is free is each one's to
        // take.
        let free = total_pages.saturating_sub(used);
        let decided = decision.targets.iter().zip(&decision.take_back);
        let known = parties.into_iter().zip(decided).map(|(party, (&decided, &take_back))| {
            let pages = decided.unwrap_or(party.used_pages.saturating_add(free));
            let bytes = |pages: u64| (pages / party.copies).saturating_mul(PAGE_SIZE as u64);
            let word = Word { target_bytes: Some(bytes(pages)), take_back_bytes: bytes(take_back) };
            let Party { who, space, counted, .. } = party;
            (who, Known { space, counted, decided, word })
        });
        self.known = known.collect();
        self.share.used_pages = used + apart;
        self.share.wanted_pages = decision.wanted_pages.saturating_add(apart);
        self.share.request_pages = decision.request_pages;
    }
}

impl Party {
    /// One that has counted something already.
    fn of_consumer(consumer: &ConsumerReport) -> Option<Party> {
        let stats = consumer.stats.as_ref()?;
        let copies = u64::from(stats.pool.copies.max(1));
        Some(Party {
            who: Who::Paged(consumer.name.clone()),
            space: consumer.space,
            used_pages: stats.pool_bytes / PAGE_SIZE as u64 * copies,
            copies,
            counted: Counted {
                puts: stats.puts_total,
                puts_succeeded: stats.puts_succeeded,
                gets: stats.pages_in,
            },
        })
    }

    fn of_volume(volume: &VolumeReport) -> Option<Party> {
        let stats = volume.stats.as_ref()?;
        let copies = u64::from(volume.copies.max(1));
        Some(Party {
            who: Who::Volume(volume.name.clone()),
            space: stats.pool.id,
            used_pages: stats.pool_bytes() / PAGE_SIZE as u64 * copies,
            copies,
            counted: Counted {
                puts: stats.puts_total,
                puts_succeeded: stats.puts_succeeded,
                gets: stats.gets,
            },
        })
    }

    /// Its counts since the last decision; zero at its first one.
    fn statistics(&self, before: Option<&Known>) -> ConsumerStatistics {
        let before = before.filter(|known| known.space == self.space);
        let now = self.counted;
        let then = before.map_or(now, |known| known.counted);
        ConsumerStatistics {
            id: ConsumerId(self.space.0),
            used_pages: self.used_pages,
            target_pages: before.and_then(|known| known.decided),
            puts_total: now.puts.saturating_sub(then.puts) * self.copies,
            puts_succeeded: now.puts_succeeded.saturating_sub(then.puts_succeeded) * self.copies,
            gets: now.gets.saturating_sub(then.gets) * self.copies,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::report::HeartbeatAnswer;
    use crate::pagers::PagerState;
    use crate::volumes::tests::counted;
    use hecaton_donor::Snapshot;
    use hecaton_memory::pages_to_bytes;
    use hecaton_pager::{PoolUse, Stats};
    use hecaton_policy::cluster::choice::Choice;
    use serde_json::json;

    const TLP: Choice = Choice::Tlp { percent: 10, threshold_pages: 50, reserve_pages: 0 };

    fn donor(pages: u64) -> Vec<DonorReport> {
        let stats = Snapshot { limit_pages: pages, ..Snapshot::default() };
        vec![DonorReport { stats: Some(stats), ..DonorReport::default() }]
    }

    /// A consumer that uses so many pages, of whose puts so many found no room, ever.
    fn consumer(name: &str, used: u64, failed: u64, copies: u8) -> ConsumerReport {
        let stats = Stats {
            pool_bytes: pages_to_bytes(used),
            puts_total: 1000 + failed,
            puts_succeeded: 1000,
            pool: PoolUse { copies, ..PoolUse::default() },
            ..Stats::default()
        };
        ConsumerReport {
            name: name.to_owned(),
            space: SpaceId(name.len() as u64),
            state: PagerState::Serving,
            stats: Some(stats),
            ..ConsumerReport::default()
        }
    }

    /// The manager's word on a policy of this version.
    fn follow(division: &mut Division, choice: Option<Choice>, quota_pages: Option<u64>) {
        let policy = choice.map(Named::Known);
        assert_eq!(division.follow(policy.as_ref(), quota_pages), None);
    }

    fn pages(division: &Division, name: &str) -> Option<u64> {
        let word = division.word_for(name).expect("a word");
        word.target_bytes.map(|bytes| bytes / PAGE_SIZE as u64)
    }

    /// A volume in one copy that uses so many pages.
    fn volume(name: &str, used: u64, spill: Option<&str>) -> VolumeReport {
        let stats = counted(100 + name.len() as u64, pages_to_bytes(used));
        VolumeReport {
            name: name.to_owned(),
            copies: 1,
            spill: spill.map(Into::into),
            stats: Some(serde_json::from_value(stats).expect("statistics")),
            ..VolumeReport::default()
        }
    }

    fn of_volume(division: &Division, name: &str) -> Option<Word> {
        division.word_for_volume(name).map(|word| Word {
            target_bytes: word.target_bytes.map(|bytes| bytes / PAGE_SIZE as u64),
            take_back_bytes: word.take_back_bytes / PAGE_SIZE as u64,
        })
    }

    #[test]
    fn pagers_hear_nothing_before_the_node_does_and_that_there_is_no_policy() {
        let mut division = Division::default();
        division.decide(&donor(1000), &[consumer("a", 1, 0, 1)], &[]);
        assert_eq!(division.word_for("a"), None);
        follow(&mut division, None, None);
        assert_eq!(division.word_for("a"), Some(Word::default()));
        follow(&mut division, Some(TLP), None);
        assert_eq!(division.word_for("a"), None, "not looked at yet");
    }

    #[test]
    fn a_quota_is_divided_and_who_puts_in_vain_gets_more() {
        let mut division = Division::default();
        follow(&mut division, Some(TLP), None);
        let beside = consumer("bb", 480, 0, 1);
        division.decide(&donor(1000), &[consumer("a", 400, 5, 1), beside.clone()], &[]);
        // As many as the node lends, in equal portions; what was counted before it came is past.
        assert_eq!((pages(&division, "a"), pages(&division, "bb")), (Some(450), Some(500)));
        follow(&mut division, Some(TLP), Some(2000));
        division.decide(&donor(1000), &[consumer("a", 400, 9, 1), beside], &[]);
        assert_eq!((pages(&division, "a"), pages(&division, "bb")), (Some(650), Some(500)));
        // A manager that starts anew has no word on it at first.
        follow(&mut division, Some(TLP), None);
        assert_eq!(division.share().quota_pages, Some(2000));
        assert_eq!(division.share().used_pages, 880);
        // Nor one that comes with another policy.
        follow(&mut division, Some(Choice::GreedyRemote { request_pages: 1 }), None);
        assert_eq!(division.share().quota_pages, Some(2000));
        // Another policy begins anew.
        follow(&mut division, Some(Choice::GreedyLocal {}), Some(1000));
        assert_eq!(division.word_for("a"), None);
        follow(&mut division, None, None);
        assert_eq!(
            (division.word_for("a"), division.share()),
            (Some(Word::default()), PoolShare::default())
        );
    }

    #[test]
    fn a_policy_of_a_later_version_leaves_the_own_one_in_force_and_is_said_once() {
        // The node understands the rest of the answer.
        let answer = json!({
            "donors": [], "draining": ["a"], "quota_pages": 700,
            "policy": {"policy": "fair", "spread": {"of": 3}},
        });
        let answer: HeartbeatAnswer = serde_json::from_value(answer).expect("read");
        assert_eq!((answer.draining.len(), answer.quota_pages), (1, Some(700)));
        let later = answer.policy.expect("one");
        // So with settings that are not known.
        let settings = json!({"policy": "greedy-local", "percent": 1});
        let settings: Named = serde_json::from_value(settings).expect("read");
        assert_eq!(settings, Named::Unknown { policy: "greedy-local".to_owned() });

        let mut division = Division::default();
        follow(&mut division, Some(TLP), Some(1000));
        let consumers = [consumer("a", 400, 0, 1)];
        division.decide(&[], &consumers, &[]);
        assert_eq!(pages(&division, "a"), Some(900));
        assert_eq!(division.follow(Some(&later), Some(700)), Some(&later));
        assert_eq!(division.follow(Some(&later), Some(700)), None, "it was said");
        division.decide(&[], &consumers, &[]);
        assert_eq!(pages(&division, "a"), Some(700), "its part of the quota, by the own policy");
        let share = division.share();
        assert_eq!((share.policy, share.quota_pages), (Some(TLP), Some(700)));
        assert_eq!((share.is_policy_unknown, share.used_pages), (true, 400));
        follow(&mut division, None, None);
        assert_eq!(
            (division.word_for("a"), division.share()),
            (Some(Word::default()), PoolShare::default())
        );
    }

    #[test]
    fn without_a_policy_of_its_own_a_node_says_what_it_uses_where_others_divide() {
        let mut division = Division::default();
        follow(&mut division, None, None);
        let later = Named::Unknown { policy: "fair".to_owned() };
        assert_eq!(division.follow(Some(&later), Some(700)), Some(&later));
        division.decide(&donor(1000), &[consumer("a", 300, 0, 2)], &[]);
        let share = division.share();
        assert_eq!((share.quota_pages, share.used_pages, share.wanted_pages), (None, 600, 600));
        assert_eq!(division.word_for("a"), Some(Word::default()), "nothing limits it");
    }

    #[test]
    fn copies_and_volumes_are_counted() {
        let mut division = Division::default();
        let greedy = Choice::GreedyRemote { request_pages: 70 };
        follow(&mut division, Some(greedy), Some(1000));
        let mut consumers = [consumer("a", 300, 0, 2)];
        division.decide(&[], &consumers, &[]);
        // 600 are used, and the other 400 are 200 pages.
        assert_eq!((pages(&division, "a"), division.share().request_pages), (Some(500), 0));
        consumers[0] = consumer("a", 500, 1, 2);
        division.decide(&[], &consumers, &[]);
        assert_eq!((pages(&division, "a"), division.share().request_pages), (Some(500), 70));
        assert_eq!(division.share().used_pages, 1000);
    }

    #[test]
    fn volumes_with_a_spill_file_have_targets_and_others_come_first() {
        let mut division = Division::default();
        follow(&mut division, Some(TLP), Some(1000));
        let mut volumes = [volume("disk", 300, Some("/spill")), volume("plain", 200, None)];
        // A consumer of the same name is another one.
        division.decide(&[], &[consumer("disk", 100, 0, 1)], &volumes);
        assert_eq!(division.share().used_pages, 600);
        let word = of_volume(&division, "disk").expect("a word");
        let both = (word.target_bytes, pages(&division, "disk"));
        assert_eq!(
            both,
            (Some(360), Some(360)),
            "nearly equal portions of what the plain one leaves"
        );
        assert_eq!(of_volume(&division, "plain"), None);
        // The volume wants the pages that it had to write to its file.
        let stats = volumes[0].stats.as_mut().expect("some");
        (stats.puts_total, stats.puts_succeeded) = (20, 10);
        division.decide(&[], &[], &volumes);
        assert!(of_volume(&division, "disk").expect("a word").target_bytes > Some(400));
        assert_eq!(division.word_for("disk"), None, "it has gone");
        follow(&mut division, None, None);
        assert_eq!(of_volume(&division, "disk"), Some(Word::default()));
    }

    #[test]
    fn what_lies_idle_in_a_volume_is_taken_back_for_who_is_in_want() {
        let mut division = Division::default();
        follow(&mut division, Some(Choice::Anticipating {}), Some(100_000));
        let volumes = [volume("disk", 80_000, Some("/spill"))];
        let mut taken = 0;
        for second in 0..30 {
            let mut wants = consumer("a", 20_000, 0, 1);
            let stats = wants.stats.as_mut().expect("some");
            // It reads what it has, and has no room for more.
            (stats.puts_total, stats.pages_in) = (1000 + 500 * second, 20_000 * second);
            division.decide(&[], &[wants], &volumes);
            let word = of_volume(&division, "disk").expect("a word");
            assert!(
                word.take_back_bytes <= 80_000 - word.target_bytes.expect("a target").min(80_000)
            );
            assert!(second > 8 || word.take_back_bytes == 0, "nothing is idle yet");
            assert_eq!(division.word_for("a").expect("a word").take_back_bytes, 0, "it is not");
            taken = word.take_back_bytes;
        }
        assert!(taken > 0, "{division:?}");
        // Nobody is in want: what is idle stays.
        for _ in 0..30 {
            division.decide(&[], &[], &volumes);
        }
        assert_eq!(of_volume(&division, "disk").expect("a word").take_back_bytes, 0);
    }

    #[test]
    fn a_donor_that_gives_back_is_nobodys_to_divide() {
        let mut draining = donor(1000);
        draining[0].stats.as_mut().expect("some").draining = true;
        assert_eq!(NodeReport::home_pages(&draining), 0);
        assert_eq!(NodeReport::home_pages(&donor(1000)), 1000);
    }
}
