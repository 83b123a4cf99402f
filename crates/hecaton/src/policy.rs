//! `hecaton policy`: who of the cluster may hold how much of the pool, and how many harvest VMs
//! there may be.

use crate::cluster::ClusterArgs;
use crate::terminal::failure::{Usage, usage};
use clap::{Subcommand, ValueEnum};
use hecaton_manager::ClusterStatus;
use hecaton_manager::harvest::HarvestStatus;
use hecaton_memory::{PAGE_SIZE, Size};
use hecaton_policy::cluster::choice::{Choice, Named};
use hecaton_policy::cluster::targets::{GREEDY_REQUEST_PAGES, tlp};
use serde::Serialize;
use std::process::ExitCode;

/// Commands about the policy that divides the pool.
#[derive(Subcommand)]
pub(crate) enum Policy {
    /// Shows the policy by which the pool is divided
    Show(ShowArgs),
    /// Divides the pool by another policy from now on, while programs run
    #[command(
        after_help = "The manager keeps the policy, and each second tells nodes how much of the pool their \
consumers may use together; nodes divide that. A target is soft: no program is ended and no page is lost by \
it. What a consumer may hold and holds is in `hecaton status`; what the policies are, in docs/policies.md."
    )]
    Set(SetArgs),
    /// Shows how many harvest VMs the cluster may have, or sets it
    #[command(
        after_help = "A harvest VM uses memory that was others' before it, and this is how many there are of them. \
Harvest VMs that are there beyond a new quota stay. A node admits one only when the manager has granted it a place, and \
what a node was granted counts as long as it may use it: also while it is away or the manager has started anew, and after \
it has ended with harvest VMs running, until it is back or `hecaton node remove` says that it is gone."
    )]
    HarvestQuota(HarvestQuotaArgs),
}

/// Arguments of `hecaton policy harvest-quota`.
#[derive(clap::Args)]
pub(crate) struct HarvestQuotaArgs {
    /// Most harvest VMs of all nodes together, or `none`; it is shown if nothing is said
    #[arg(value_parser = quota)]
    quota: Option<Quota>,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Prints one JSON object
    #[arg(long, conflicts_with = "quota")]
    json: bool,
}

/// None: as many as hosts have room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Quota(Option<u64>);

fn quota(word: &str) -> Result<Quota, String> {
    match word {
        "none" => Ok(Quota(None)),
        number => number.parse().map(|number| Quota(Some(number))).map_err(|_| {
            format!("`{number}` is no number of machines; say 12, for example, or none")
        }),
    }
}

/// Arguments of `hecaton policy show`.
#[derive(clap::Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `hecaton policy set`.
#[derive(clap::Args)]
pub(crate) struct SetArgs {
    /// The policy
    #[arg(value_enum)]
    policy: Name,
    /// tlp: percent of the node's memory by which a target rises, and of itself by which it falls,
    /// in a second; 2 if nothing is said
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(1..=100))]
    p: Option<u64>,
    /// tlp: memory that a consumer may leave unused before its target falls; 4M if nothing is said
    #[arg(long, value_name = "SIZE")]
    threshold: Option<Size>,
    /// tlp: memory that a node keeps free when others ask for it; 64M if nothing is said
    #[arg(long, value_name = "SIZE")]
    reserve: Option<Size>,
    /// greedy-remote: memory that a node asks for in a second in which it had too little; 4000K if
    /// nothing is said
    #[arg(long, value_name = "SIZE")]
    request: Option<Size>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// No limit: each consumer holds what it gets
    None,
    /// Nodes use what they lend themselves; the first to ask gets it
    GreedyLocal,
    /// The first to ask gets it, and a node without room asks for other nodes' share
    GreedyRemote,
    /// The two-level policy of the vMCA paper
    Tlp,
    /// Targets that run ahead of demand, shared evenly among those in want
    Anticipating,
}

/// JSON object that `--json` prints.
#[derive(Serialize)]
struct Shown<'a> {
    manager: &'a str,
    policy: Option<Named>,
    /// Policy in force as long as the manager does not know `policy`.
    policy_instead: Option<Named>,
}

pub(crate) fn run(policy: &Policy) -> anyhow::Result<ExitCode> {
    match policy {
        Policy::Show(args) => show(args),
        Policy::Set(args) => set(args),
        Policy::HarvestQuota(args) => harvest_quota(args),
    }
}

fn show(args: &ShowArgs) -> anyhow::Result<ExitCode> {
    let manager = args.cluster.need_manager()?;
    let status = manager.status()?;
    match args.json {
        true => {
            let ClusterStatus { policy, policy_instead, .. } = status;
            let shown = Shown { manager: &manager.url, policy, policy_instead };
            println!("{}", serde_json::to_string(&shown)?);
        }
        false => println!("{}", in_words(status.policy_in_words())),
    }
    Ok(ExitCode::SUCCESS)
}

fn set(args: &SetArgs) -> anyhow::Result<ExitCode> {
    let choice = args.choice()?;
    args.cluster.need_manager()?.choose(choice)?;
    Ok(ExitCode::SUCCESS)
}

fn harvest_quota(args: &HarvestQuotaArgs) -> anyhow::Result<ExitCode> {
    let manager = args.cluster.need_manager()?;
    if let Some(Quota(quota)) = args.quota {
        manager.set_harvest_quota(quota)?;
        return Ok(ExitCode::SUCCESS);
    }
    let harvest = manager.status()?.harvest;
    match args.json {
        true => println!("{}", serde_json::json!({ "manager": manager.url, "harvest": harvest })),
        false => println!("{}", harvest_in_words(harvest.as_ref())),
    }
    Ok(ExitCode::SUCCESS)
}

/// The quota of harvest VMs, for people.
pub(crate) fn harvest_in_words(harvest: Option<&HarvestStatus>) -> String {
    let Some(HarvestStatus { quota, counted, unheard }) = harvest else {
        return "none: there are as many harvest VMs as hosts have room for".to_owned();
    };
    let mut text = format!("{quota} harvest VMs, of which nodes have or may have {counted}");
    if let Some(first) = unheard.first() {
        let more = match unheard.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        text += &format!(
            "; no further one until {first}{more} has heard of it: if it is gone, `hecaton node remove {first}`"
        );
    }
    text
}

impl SetArgs {
    fn choice(&self) -> anyhow::Result<Option<Choice>> {
        let of_tlp = [
            ("--p", self.p.is_some()),
            ("--threshold", self.threshold.is_some()),
            ("--reserve", self.reserve.is_some()),
        ];
        let of_greedy = [("--request", self.request.is_some())];
        let foreign = of_tlp.iter().filter(|_| self.policy != Name::Tlp);
        let foreign = foreign.chain(of_greedy.iter().filter(|_| self.policy != Name::GreedyRemote));
        for (option, is_given) in foreign {
            if *is_given {
                let own = if *option == "--request" { "greedy-remote" } else { "tlp" };
                usage!("{option} is a setting of the policy {own}, and of no other");
            }
        }
        let defaults = tlp::Settings::default();
        let choice = match self.policy {
            Name::None => return Ok(None),
            Name::GreedyLocal => Choice::GreedyLocal {},
            Name::GreedyRemote => Choice::GreedyRemote {
                request_pages: pages("--request", self.request, GREEDY_REQUEST_PAGES)?,
            },
            Name::Tlp => Choice::Tlp {
                percent: self.p.unwrap_or(defaults.percent),
                threshold_pages: pages("--threshold", self.threshold, defaults.threshold_pages)?,
                reserve_pages: pages("--reserve", self.reserve, defaults.reserve_pages)?,
            },
            Name::Anticipating => Choice::Anticipating {},
        };
        if let Err(error) = choice.check() {
            usage!("{error}");
        }
        Ok(Some(choice))
    }
}

/// Whole pages, or `or` if nothing is said.
fn pages(option: &str, size: Option<Size>, or: u64) -> anyhow::Result<u64> {
    let Some(Size(bytes)) = size else { return Ok(or) };
    match bytes % PAGE_SIZE as u64 {
        0 => Ok(bytes / PAGE_SIZE as u64),
        beyond => Err(Usage(format!(
            "{option} has {beyond} bytes beyond a multiple of the page, {PAGE_SIZE}; say 4M, for example"
        ))
        .into()),
    }
}

/// The policy, for people; or that there is none.
pub(crate) fn in_words(policy: Option<String>) -> String {
    policy.unwrap_or_else(|| "none: everybody may hold what it gets".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cli, Command};
    use clap::Parser as _;

    fn choice(words: &str) -> anyhow::Result<Option<Choice>> {
        let words = ["hecaton", "policy", "set"].into_iter().chain(words.split(' '));
        let cli = Cli::try_parse_from(words)?;
        let Command::Policy(Policy::Set(args)) = cli.command else { panic!("another command") };
        args.choice()
    }

    #[test]
    fn what_is_shown_is_what_was_set() {
        for words in [
            "greedy-local",
            "greedy-remote --request 8M",
            "tlp --p 5 --threshold 8M --reserve 0",
            "anticipating",
        ] {
            let chosen = choice(words).expect(words);
            assert_eq!(shown(chosen), words);
        }
        assert_eq!(shown(choice("tlp").unwrap()), "tlp --p 2 --threshold 4M --reserve 64M");
        let request_pages = GREEDY_REQUEST_PAGES;
        assert_eq!(choice("greedy-remote").unwrap(), Some(Choice::GreedyRemote { request_pages }));
        assert_eq!(choice("none").unwrap(), None);
    }

    fn shown(choice: Option<Choice>) -> String {
        in_words(choice.map(|choice| choice.to_string()))
    }

    #[test]
    fn the_quota_of_harvest_vms_is_a_number_or_none() {
        assert_eq!((quota("12"), quota("none")), (Ok(Quota(Some(12))), Ok(Quota(None))));
        assert!(quota("-1").unwrap_err().contains("`-1` is no number"));
        assert!(harvest_in_words(None).starts_with("none"));
        let unheard = vec!["a".to_owned(), "b".to_owned()];
        let text = harvest_in_words(Some(&HarvestStatus { quota: 3, counted: 2, unheard }));
        assert!(text.contains("3 harvest VMs") && text.contains("until a and 1 more"), "{text}");
    }

    #[test]
    fn settings_of_another_policy_and_parts_of_pages_are_refused() {
        for (words, part) in [
            ("greedy-local --p 3", "--p is a setting of the policy tlp"),
            ("tlp --request 4M", "--request is a setting of the policy greedy-remote"),
            ("anticipating --reserve 4M", "--reserve is a setting"),
            ("tlp --threshold 1000", "1000 bytes beyond"),
            ("greedy-remote --request 0", "greedy-local"),
            ("tlp --p 0", "0 is not in 1..=100"),
            ("fair", "possible values"),
        ] {
            let error = choice(words).expect_err(words).to_string();
            assert!(error.contains(part), "{words}: {error}");
        }
    }
}
