//! `hecaton simulate policies`: the vMCA paper's evaluation, again.

use super::html;
use super::results::{Compared, Report, ScenarioReport};
use crate::out;
use crate::report;
use crate::terminal::failure::Usage;
use crate::terminal::table::Table;
use clap::ValueEnum;
use hecaton_memory::{PAGE_SIZE, Size};
use hecaton_policy::cluster::targets::{GREEDY_REQUEST_PAGES, Policy, anticipating, tlp};
use hecaton_policy::simulation::{self, demand::Demands, scenario::Scenario};
use std::path::PathBuf;
use std::process::ExitCode;

/// The largest P that is compared, as in the paper.
const MOST_PERCENT: u64 = 10;

/// Arguments of `hecaton simulate policies`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Scenarios to run; 1 to 4 are the paper's
    #[arg(long, value_enum, value_delimiter = ',', default_value = "1,2,3,4,turns,churn")]
    scenario: Vec<ScenarioName>,
    /// Runs of each scenario and policy; starts and speeds differ a little in each
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1000))]
    runs: u64,
    /// Number of the first run; the same one gives the same results
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// TLP: memory that a consumer may leave unused before its target falls
    #[arg(long, value_name = "SIZE", default_value = "4M")]
    threshold: Size,
    /// TLP: memory that a node keeps free when others ask for it
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    reserve: Size,
    /// Writes a report with plots to this file, complete in itself
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Prints one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum ScenarioName {
    #[value(name = "1")]
    S1,
    #[value(name = "2")]
    S2,
    #[value(name = "3")]
    S3,
    #[value(name = "4")]
    S4,
    Turns,
    Churn,
}

impl From<ScenarioName> for Scenario {
    fn from(name: ScenarioName) -> Scenario {
        match name {
            ScenarioName::S1 => Scenario::S1,
            ScenarioName::S2 => Scenario::S2,
            ScenarioName::S3 => Scenario::S3,
            ScenarioName::S4 => Scenario::S4,
            ScenarioName::Turns => Scenario::Turns,
            ScenarioName::Churn => Scenario::Churn,
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let policies = args.policies()?;
    let demands = Demands::recorded()?;
    let scenarios = args.scenario.iter().map(|&name| Scenario::from(name));
    let scenarios = scenarios.map(|scenario| {
        let compare = |(name, policy): &(String, Policy)| {
            let outcomes = (0..args.runs).map(|run| {
                simulation::run(&demands, scenario, *policy, args.seed.wrapping_add(run))
            });
            Compared::new(name.clone(), *policy, outcomes.collect(), scenario)
        };
        ScenarioReport::new(scenario, policies.iter().map(compare).collect())
    });
    let report = Report { runs: args.runs, seed: args.seed, scenarios: scenarios.collect() };
    if let Some(file) = &args.html {
        report::write(file, &html::page(&report))?;
    }
    let text = match args.json {
        true => serde_json::to_string(&report)? + "\n",
        false => text(&report),
    };
    out::write_bytes(text.as_bytes());
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn policies(&self) -> anyhow::Result<Vec<(String, Policy)>> {
        let pages = |what: &str, size: Size| match size.0 % PAGE_SIZE as u64 {
            0 => Ok(size.0 / PAGE_SIZE as u64),
            bytes => Err(Usage(format!(
                "{what} has {bytes} bytes beyond a multiple of the page, {PAGE_SIZE}; say 4M, for example"
            ))),
        };
        let threshold_pages = pages("--threshold", self.threshold)?;
        let reserve_pages = pages("--reserve", self.reserve)?;
        let mut policies = vec![
            ("greedy-local".to_owned(), Policy::GreedyLocal),
            (
                "greedy-remote".to_owned(),
                Policy::GreedyRemote { request_pages: GREEDY_REQUEST_PAGES },
            ),
        ];
        policies.extend((1..=MOST_PERCENT).map(|percent| {
            let settings = tlp::Settings { percent, threshold_pages, reserve_pages };
            (format!("tlp {percent}%"), Policy::Tlp(settings))
        }));
        let settings = anticipating::Settings::default();
        let without = anticipating::Settings { take_back: false, ..settings };
        policies.push(("anticipating, no take-back".to_owned(), Policy::Anticipating(without)));
        policies.push(("anticipating".to_owned(), Policy::Anticipating(settings)));
        Ok(policies)
    }
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    for scenario in &report.scenarios {
        let mut table = Table::figures([
            "policy",
            "mean s",
            "longest s",
            "vs local",
            "vs remote",
            "fairness",
            "adapts s",
            "below s",
            "disk reads",
            "moved",
            "spilled",
        ]);
        for compared in &scenario.policies {
            let size = |pages: f64| Size((pages as u64 * PAGE_SIZE as u64) >> 20 << 20).to_string();
            table.row([
                compared.name.clone(),
                format!("{:.1}", compared.mean_s),
                format!("{:.1}", compared.longest_s),
                percent(compared.faster_than_local),
                percent(compared.faster_than_remote),
                format!("{:.3}", compared.fairness),
                format!("{:.1}", compared.adaptation_s),
                format!("{:.1}", compared.below_share_s),
                format!("{:.0}", compared.disk_reads),
                size(compared.pages_moved),
                size(compared.pages_spilled),
            ]);
        }
        text += &format!("Scenario {}: {}\n{table}\n", scenario.name, scenario.description);
    }
    text += "\
mean, longest: running times of the programs. vs: how much shorter the mean is than that of greedy-local \
and greedy-remote.\nfairness: Jain's index of how far needs were met. adapts: the longest time at a \
stretch below a fair share of the cluster; below: all such time, for each program.\nmoved: between nodes. spilled: written to disk to \
make room.\n";
    text
}

/// `faster` as people say it: 25 % faster is `+25.0%`.
fn percent(faster: f64) -> String {
    format!("{:+.1}%", faster * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn report(arguments: &[&str]) -> Report {
        let args = Line::parse_from(["x"].iter().chain(arguments)).args;
        let policies = args.policies().unwrap();
        let demands = Demands::recorded().unwrap();
        let scenario = Scenario::from(args.scenario[0]);
        let compare = |(name, policy): &(String, Policy)| {
            let outcome = simulation::run(&demands, scenario, *policy, args.seed);
            Compared::new(name.clone(), *policy, vec![outcome], scenario)
        };
        let compared = policies.iter().map(compare).collect();
        let scenarios = vec![ScenarioReport::new(scenario, compared)];
        Report { runs: 1, seed: args.seed, scenarios }
    }

    #[test]
    fn every_policy_is_in_the_table_and_in_a_report_that_needs_nothing_else() {
        let report = report(&["--scenario", "4"]);
        let text = text(&report);
        let page = html::page(&report);
        for compared in &report.scenarios[0].policies {
            assert!(text.contains(&compared.name), "{text}");
            assert!(page.contains(&compared.name));
        }
        crate::report::assert_complete(&page);
    }

    #[test]
    fn sizes_that_are_no_pages_are_refused() {
        let args = Line::parse_from(["x", "--reserve", "5000"]).args;
        let refusal = args.policies().unwrap_err().to_string();
        assert!(refusal.contains("--reserve") && refusal.contains("4096"), "{refusal}");
    }
}
