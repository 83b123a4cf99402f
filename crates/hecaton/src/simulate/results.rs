//! Holds the results of `hecaton simulate` for JSON, beside the paper's results.

use hecaton_policy::cluster::NodeId;
use hecaton_policy::cluster::targets::Policy;
use hecaton_policy::simulation::outcome::{Course, Outcome};
use hecaton_policy::simulation::scenario::Scenario;
use serde::Serialize;

/// All results of one `hecaton simulate`.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) runs: u64,
    pub(super) seed: u64,
    pub(super) scenarios: Vec<ScenarioReport>,
}

/// Results of one scenario.
#[derive(Serialize)]
pub(super) struct ScenarioReport {
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    /// Measurements of the paper on its own hosts.
    pub(super) paper: Option<Paper>,
    pub(super) policies: Vec<Compared>,
}

/// The paper's improvements of mean running times (section V), at its nodes 3 and 4.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Paper {
    /// Improvement of greedy-remote over greedy-local.
    pub(super) remote_over_local_percent: [f64; 2],
    /// Improvement of the best TLP over greedy-remote.
    pub(super) tlp_over_remote_percent: [f64; 2],
    /// Parameter P of the best TLP.
    pub(super) best_percent: [u64; 2],
}

/// Results of one policy in a scenario: means over the runs.
#[derive(Serialize)]
pub(super) struct Compared {
    pub(super) name: String,
    pub(super) settings: Policy,
    pub(super) mean_s: f64,
    /// Means at nodes 3 and 4.
    pub(super) mean_of_nodes_s: [f64; 2],
    pub(super) longest_s: f64,
    /// Fraction by which the mean is shorter than greedy-local's.
    pub(super) faster_than_local: f64,
    /// Fraction by which the mean is shorter than greedy-remote's.
    pub(super) faster_than_remote: f64,
    pub(super) fairness: f64,
    pub(super) adaptation_s: f64,
    pub(super) below_share_s: f64,
    pub(super) disk_reads: f64,
    pub(super) puts_failed: f64,
    pub(super) pages_moved: f64,
    pub(super) pages_spilled: f64,
    pub(super) pages_lost: f64,
    pub(super) pages_leaked: f64,
    /// Use over time at node 3 in the first run, for the plots.
    #[serde(skip)]
    pub(super) courses: Vec<Course>,
}

impl Compared {
    pub(super) fn new(
        name: String,
        settings: Policy,
        mut outcomes: Vec<Outcome>,
        scenario: Scenario,
    ) -> Compared {
        let mean = |of: &dyn Fn(&Outcome) -> f64| {
            outcomes.iter().map(of).sum::<f64>() / outcomes.len() as f64
        };
        let shown: NodeId = scenario.busy_nodes()[0];
        Compared {
            settings,
            mean_s: mean(&|outcome| outcome.mean_s(None)),
            mean_of_nodes_s: scenario
                .busy_nodes()
                .map(|node| mean(&|outcome| outcome.mean_s(Some(node)))),
            longest_s: mean(&Outcome::longest_s),
            faster_than_local: 0.0,
            faster_than_remote: 0.0,
            fairness: mean(&|outcome| outcome.fairness),
            adaptation_s: mean(&|outcome| outcome.adaptation_s),
            below_share_s: mean(&|outcome| outcome.below_share_s),
            disk_reads: mean(&|outcome| outcome.disk_reads as f64),
            puts_failed: mean(&|outcome| outcome.puts_failed as f64),
            pages_moved: mean(&|outcome| outcome.pages_moved as f64),
            pages_spilled: mean(&|outcome| outcome.pages_spilled as f64),
            pages_lost: mean(&|outcome| outcome.pages_lost as f64),
            pages_leaked: mean(&|outcome| outcome.pages_leaked as f64),
            courses: outcomes
                .swap_remove(0)
                .courses
                .into_iter()
                .filter(|course| course.node == shown)
                .collect(),
            name,
        }
    }

    /// Parameter P, if the policy is a TLP.
    pub(super) fn percent(&self) -> Option<u64> {
        match self.settings {
            Policy::Tlp(settings) => Some(settings.percent),
            _ => None,
        }
    }
}

impl ScenarioReport {
    pub(super) fn new(scenario: Scenario, mut policies: Vec<Compared>) -> ScenarioReport {
        let mean_of = |wanted: fn(&Policy) -> bool| {
            policies.iter().find(|compared| wanted(&compared.settings)).map(|found| found.mean_s)
        };
        let local_s = mean_of(|policy| matches!(policy, Policy::GreedyLocal));
        let remote_s = mean_of(|policy| matches!(policy, Policy::GreedyRemote { .. }));
        for compared in &mut policies {
            compared.faster_than_local = local_s.map_or(0.0, |than| faster(compared.mean_s, than));
            compared.faster_than_remote =
                remote_s.map_or(0.0, |than| faster(compared.mean_s, than));
        }
        let description = scenario.description();
        ScenarioReport { name: scenario.name(), description, paper: paper(scenario), policies }
    }

    pub(super) fn find(&self, wanted: impl Fn(&Policy) -> bool) -> Option<&Compared> {
        self.policies.iter().find(|compared| wanted(&compared.settings))
    }

    /// The TLP with the shortest mean.
    pub(super) fn best_tlp(&self) -> Option<&Compared> {
        let tlps = self.policies.iter().filter(|compared| compared.percent().is_some());
        tlps.min_by(|a, b| a.mean_s.total_cmp(&b.mean_s))
    }
}

/// Fraction by which `seconds` is shorter than `than`; 0 without a positive `than`.
pub(super) fn faster(seconds: f64, than: f64) -> f64 {
    if than > 0.0 { 1.0 - seconds / than } else { 0.0 }
}

fn paper(scenario: Scenario) -> Option<Paper> {
    let (remote_over_local_percent, tlp_over_remote_percent, best_percent) = match scenario {
        Scenario::S1 => ([11.94, 12.9], [7.3, 7.0], [2, 6]),
        Scenario::S2 => ([50.84, 45.96], [32.1, 31.8], [2, 2]),
        Scenario::S3 => ([50.6, 55.4], [10.1, 15.6], [6, 4]),
        Scenario::S4 => ([63.5, 76.8], [23.7, 37.5], [2, 2]),
        Scenario::Turns | Scenario::Churn => return None,
    };
    Some(Paper { remote_over_local_percent, tlp_over_remote_percent, best_percent })
}
