//! The terminal: asks for overviews, listens to keys and signals, and leaves everything as it was,
//! also after a panic.

use super::page::{Order, Page};
use crate::daemons::lifetime;
use hecaton_manager::watching::overview::Overview;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::widgets::Paragraph;
use ratatui::{DefaultTerminal, Frame};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::Duration;

/// Time between two looks at the cluster.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long a key or a signal may wait for its effect.
const TICK: Duration = Duration::from_millis(100);

/// Shows `page` until its reader has seen enough. `look` is asked for what is new.
pub(super) fn show(
    page: &mut Page,
    look: impl Fn() -> anyhow::Result<Overview> + Send + 'static,
) -> anyhow::Result<()> {
    let over = end_by_signal()?;
    let news = look_on(look)?;
    // Raw mode and the other screen; a panic puts the terminal back before it says anything.
    let mut terminal = ratatui::try_init()?;
    let result = follow(&mut terminal, page, &news, &over);
    ratatui::restore();
    result
}

/// A flag that a signal sets. Ctrl-C is a key while the terminal is raw; from elsewhere it is a
/// signal.
fn end_by_signal() -> anyhow::Result<Arc<AtomicBool>> {
    let (runtime, mut signals) = lifetime::begin()?;
    let over = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&over);
    thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(signals.next());
        flag.store(true, Ordering::Relaxed);
    })?;
    Ok(over)
}

/// Looks time and again in a thread of its own, so that a manager that does not answer holds up no
/// key.
fn look_on(
    look: impl Fn() -> anyhow::Result<Overview> + Send + 'static,
) -> anyhow::Result<Receiver<anyhow::Result<Overview>>> {
    // One at most waits to be shown.
    let (tell, news) = sync_channel(1);
    thread::Builder::new().name("overview".into()).spawn(move || {
        loop {
            thread::sleep(INTERVAL);
            if tell.send(look()).is_err() {
                return;
            }
        }
    })?;
    Ok(news)
}

fn follow(
    terminal: &mut DefaultTerminal,
    page: &mut Page,
    news: &Receiver<anyhow::Result<Overview>>,
    over: &AtomicBool,
) -> anyhow::Result<()> {
    let mut scroll = Scroll::default();
    while !over.load(Ordering::Relaxed) {
        terminal.draw(|frame| draw(frame, page, &mut scroll))?;
        // Whatever comes first, and at the latest after a tick: a signal wakes nobody.
        if event::poll(TICK)? {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => match act(key, page) {
                    Some(Step::End) => return Ok(()),
                    Some(Step::Move(lines)) => scroll.by(lines),
                    None => {}
                },
                _ => {}
            }
        }
        match news.try_recv() {
            Ok(Ok(overview)) => (page.overview, page.trouble) = (overview, None),
            Ok(Err(error)) => page.trouble = Some(format!("{error:#}")),
            Err(_) => {}
        }
    }
    Ok(())
}

/// Effect of a key beyond the page's order.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    End,
    Move(i32),
}

fn act(key: KeyEvent, page: &mut Page) -> Option<Step> {
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(Step::End),
        KeyCode::Char('q') | KeyCode::Esc => Some(Step::End),
        KeyCode::Char('f') => {
            page.order = Order::Faults;
            None
        }
        KeyCode::Char('u') => {
            page.order = Order::Use;
            None
        }
        KeyCode::Char('n') => {
            page.order = Order::Name;
            None
        }
        KeyCode::Up => Some(Step::Move(-1)),
        KeyCode::Down => Some(Step::Move(1)),
        KeyCode::PageUp => Some(Step::Move(-10)),
        KeyCode::PageDown => Some(Step::Move(10)),
        KeyCode::Home => Some(Step::Move(i32::MIN)),
        KeyCode::End => Some(Step::Move(i32::MAX)),
        _ => None,
    }
}

/// The first line that is shown.
#[derive(Debug, Default)]
struct Scroll(u16);

impl Scroll {
    fn by(&mut self, lines: i32) {
        let to = i32::from(self.0).saturating_add(lines);
        self.0 = to.clamp(0, i32::from(u16::MAX)) as u16;
    }

    /// No further than to the last line.
    fn within(&mut self, lines: usize, height: u16) -> u16 {
        let most = lines.saturating_sub(usize::from(height)).min(usize::from(u16::MAX));
        self.0 = self.0.min(most as u16);
        self.0
    }
}

fn draw(frame: &mut Frame<'_>, page: &Page, scroll: &mut Scroll) {
    let areas = Layout::vertical([Constraint::Min(0), Constraint::Length(1)]);
    let [body, foot] = areas.areas(frame.area());
    let lines = page.lines(body.width);
    let first = scroll.within(lines.len(), body.height);
    frame.render_widget(Paragraph::new(lines).scroll((first, 0)), body);
    frame.render_widget(Paragraph::new(page.foot()), foot);
}

#[cfg(test)]
mod tests {
    use super::super::page::tests::page;
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn screen(page: &Page, width: u16, height: u16, scroll: &mut Scroll) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
        terminal.draw(|frame| draw(frame, page, scroll)).expect("drawn");
        let buffer = terminal.backend().buffer();
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| row(y).trim_end().to_owned()).collect()
    }

    #[test]
    fn it_fits_any_terminal() {
        for (width, height) in [(200, 60), (80, 24), (40, 10), (10, 3), (1, 1)] {
            screen(&page(), width, height, &mut Scroll::default());
        }
    }

    #[test]
    fn the_page_moves_and_the_keys_stay() {
        let mut scroll = Scroll::default();
        let top = screen(&page(), 80, 8, &mut scroll);
        assert!(top[0].starts_with("hecaton"), "{top:?}");
        assert!(top[7].starts_with("q ends"), "{top:?}");
        scroll.by(i32::MAX);
        let bottom = screen(&page(), 80, 8, &mut scroll);
        assert!(bottom[6].starts_with("donor-2"), "{bottom:?}");
        assert_eq!(bottom[7], top[7]);
        scroll.by(i32::MIN);
        assert_eq!(screen(&page(), 80, 8, &mut scroll), top);
    }

    #[test]
    fn keys_sort_and_end() {
        let mut page = page();
        let press = |page: &mut Page, code| act(KeyEvent::new(code, KeyModifiers::NONE), page);
        assert_eq!(press(&mut page, KeyCode::Char('u')), None);
        assert_eq!(page.order, Order::Use);
        assert_eq!(press(&mut page, KeyCode::Char('n')), None);
        assert_eq!(page.order, Order::Name);
        assert_eq!(press(&mut page, KeyCode::Char('q')), Some(Step::End));
        assert_eq!(press(&mut page, KeyCode::Char('c')), None);
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(act(interrupt, &mut page), Some(Step::End));
    }
}
