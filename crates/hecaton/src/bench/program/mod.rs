//! The programs that the benches run on pool memory, as hidden subcommands of `hecaton bench`.
//!
//! They are ordinary programs to the pager: dynamically linked, with no knowledge of Hecaton. That
//! they live in this executable is so that an installed `hecaton` can measure without further
//! files. A program reports as one line of JSON on its standard output.

pub(super) mod application;
pub(super) mod guest;
pub(super) mod pages;
pub(super) mod quicksort;
pub(super) mod quicksorts;
pub(super) mod steady;
pub(super) mod sweep;
pub(super) mod touch;

use serde::Serialize;

/// Which program.
#[derive(clap::Subcommand)]
pub(crate) enum Program {
    /// Random faults beside round trips of plain TCP.
    Touch(touch::Args),
    /// Random accesses without end, told of on request.
    Steady(steady::Args),
    /// Sequential sweeps beside a stream of plain TCP.
    Sweep(sweep::Args),
    /// Fills an array of integers at random and sorts it.
    Quicksort(quicksort::Args),
    /// Does that in several processes at a time.
    Quicksorts(quicksorts::Args),
    /// Does within a guest what `bench vm` and `bench harvest` ask for.
    Guest(guest::Args),
    /// Fills the memory that it may have, and gives it back.
    Application(application::Args),
    /// Tells who has each page of the machine's memory.
    Pages(pages::Args),
}

pub(super) fn run(program: Program) -> anyhow::Result<()> {
    match program {
        Program::Touch(args) => report(&touch::run(&args)?),
        Program::Steady(args) => steady::run(&args),
        Program::Sweep(args) => report(&sweep::run(&args)?),
        Program::Quicksort(args) => report(&quicksort::run(&args)?),
        Program::Quicksorts(args) => report(&quicksorts::run(&args)?),
        Program::Guest(guest::Args {}) => guest::run(),
        Program::Application(args) => application::run(&args),
        Program::Pages(args) => report(&pages::run(&args)?),
    }
}

fn report(result: &impl Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(result)?);
    Ok(())
}
