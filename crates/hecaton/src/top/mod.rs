//! `hecaton top`: the cluster at a glance, live, in the terminal.
//!
//! Shows the manager's overview, as the dashboard does: [`page`] makes lines of it, and [`screen`]
//! puts those on the terminal.

mod page;
mod screen;

use crate::cluster::{ClusterArgs, Manager};
use anyhow::Context as _;
use hecaton_manager::watching::overview::Overview;
use page::{Order, Page};
use std::env;
use std::io::IsTerminal as _;
use std::process::ExitCode;

/// The width of `--once` where there is no terminal.
const ONCE_WIDTH: u16 = 100;

/// Arguments of `hecaton top`.
#[derive(clap::Args)]
#[command(after_help = "\
Keys: f sorts consumers by faults, u by use of the pool, n by name; arrows, Page Up, Page Down, Home \
and End move; q ends.\n\
Without colours where NO_COLOR is set. A number that nobody has told yet is a dash.")]
pub(crate) struct Args {
    /// Prints one frame as text, and ends
    #[arg(long)]
    once: bool,
    /// Prints one JSON object, and ends
    #[arg(long, conflicts_with = "once")]
    json: bool,
    /// Order of consumers at the start
    #[arg(long, value_name = "ORDER", value_enum, default_value_t = Order::Faults)]
    sort: Order,
    #[command(flatten)]
    cluster: ClusterArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let manager = args.cluster.need_manager()?;
    if args.json {
        println!("{}", serde_json::to_string(&look(&manager)?)?);
        return Ok(ExitCode::SUCCESS);
    }
    let mut page = Page {
        manager: manager.url.clone(),
        overview: look(&manager)?,
        trouble: None,
        order: args.sort,
        colours: env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
    };
    if args.once {
        let width = match std::io::stdout().is_terminal() {
            true => ratatui::crossterm::terminal::size().map_or(ONCE_WIDTH, |(width, _)| width),
            false => ONCE_WIDTH,
        };
        for line in page.lines(width) {
            println!("{}", line.to_string().trim_end());
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        anyhow::bail!("`hecaton top` needs a terminal; print one frame with --once, or --json");
    }
    screen::show(&mut page, move || look(&manager)).context("cannot use the terminal")?;
    Ok(ExitCode::SUCCESS)
}

fn look(manager: &Manager) -> anyhow::Result<Overview> {
    manager.get("v1/overview")
}
