//! When a schedule fires: cron text and a time zone give slots, instants at which one task is due.
//!
//! A slot is a minute of the zone's wall clock that the cron text matches. Where the clock is set, the text's hour field decides. A text that names hours means
//! the clock on the wall: a time that is skipped fires once, at the first instant after the gap, however many of its minutes were skipped; a time that comes
//! twice fires the first time. A text that matches every hour means real time: it fires whenever the clock shows a matching minute, so twice where a time
//! comes twice, and makes nothing up for a gap.

use croner::CronPattern;
use croner::parser::{CronParser, Seconds, Year};
use croner::time::Weekday;
use jiff::civil::{Date, DateTime, Time};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Timestamp};

/// Why there is no such schedule.
#[derive(Debug)]
pub enum Fault {
    /// The text is no cron text; in words.
    Text(String),
    /// It matches no day of the next hundred years.
    Never,
    /// No such time zone; the nearest there is.
    Zone(Option<String>),
}

/// What becomes of slots that passed while nobody looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CatchUp {
    /// They are left out.
    None,
    /// The latest of them fires, for all.
    Last,
    /// Each fires, the earliest first.
    All,
}

impl CatchUp {
    /// The policy of that name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "none" => Some(CatchUp::None),
            "last" => Some(CatchUp::Last),
            "all" => Some(CatchUp::All),
            _ => None,
        }
    }
}

/// Seconds after which a slot counts as missed.
pub const GRACE: i64 = 60;

/// No clock was ever set by more than a day; with two hours of room.
const FURTHEST_SHIFT: SignedDuration = SignedDuration::from_hours(26);

/// Days to look ahead for a match: 29 February on a given weekday may be forty years off.
const HORIZON: usize = 36_525;

/// Parsed cron text in its time zone. Instants are seconds since 1970.
pub struct Cron {
    pattern: CronPattern,
    minutes: Vec<i8>,
    hours: Vec<i8>,
    zone: TimeZone,
}

impl Cron {
    /// Reads five fields (minute, hour, day of month, month, day of week) or a nickname such as `@daily`, and the name of a zone in the IANA database.
    pub fn new(text: &str, zone: &str) -> Result<Self, Fault> {
        let parser = CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
        let pattern = parser.parse(text).map_err(|error| Fault::Text(error.to_string()))?.pattern;
        let minutes = (0..60).filter(|minute| pattern.minute_match(*minute as u32).unwrap_or(false)).collect();
        let hours = (0..24).filter(|hour| pattern.hour_match(*hour as u32).unwrap_or(false)).collect();
        let cron = Cron { pattern, minutes, hours, zone: find_zone(zone)? };
        // Any long stretch of years holds every kind of year.
        cron.next(0).is_some().then_some(cron).ok_or(Fault::Never)
    }

    /// The zone's name as the database spells it.
    pub fn zone_name(&self) -> Option<&str> {
        self.zone.iana_name()
    }

    /// The first slot strictly after `after`.
    pub fn next(&self, after: i64) -> Option<i64> {
        let start = self.earliest_wall_clock(Timestamp::from_second(after).ok()?)?;
        let mut first_minute = Time::new(start.hour(), start.minute(), 0, 0).ok()?;
        let mut second_pass: Option<i64> = None;
        let mut day = start.date();
        for _ in 0..HORIZON {
            if !self.matches_month(day) {
                day = day.last_of_month();
            } else if self.matches_day(day) {
                let times = self.hours.iter().flat_map(|hour| self.minutes.iter().map(move |minute| (*hour, *minute)));
                for (hour, minute) in times.filter(|time| *time >= (first_minute.hour(), first_minute.minute())) {
                    let (once, again) = self.instants(day.at(hour, minute, 0, 0));
                    // Later minutes of the wall clock come later the first time they come; only the second pass of a repeated hour can come before.
                    if let Some(once) = once.filter(|once| *once > after) {
                        return Some(second_pass.map_or(once, |again| again.min(once)));
                    }
                    if let Some(again) = again.filter(|again| *again > after) {
                        second_pass = Some(second_pass.map_or(again, |other| other.min(again)));
                    }
                }
            }
            first_minute = Time::midnight();
            day = day.tomorrow().ok()?;
        }
        second_pass
    }

    /// The slot to fire at `now`, where `last` is the latest that fired (or since when the schedule is in force). Ask again with what it answers.
    pub fn due(&self, last: i64, now: i64, catch_up: CatchUp) -> Option<i64> {
        let from = if catch_up == CatchUp::None { last.max(now.saturating_sub(GRACE)) } else { last };
        let first = self.next(from).filter(|slot| *slot <= now)?;
        if catch_up != CatchUp::Last {
            return Some(first);
        }
        // The latest slot up to `now`: next() never decreases, so halve what is left of the time.
        let (mut latest, mut none_after) = (first, now);
        while latest < none_after {
            let middle = latest + (none_after - latest) / 2;
            match self.next(middle).filter(|slot| *slot <= now) {
                Some(later) => latest = later,
                None => none_after = middle,
            }
        }
        Some(latest)
    }

    /// What the wall clock showed at this instant, or would show by the other offset where the clock is set around then: every minute that comes later, also
    /// for the second time, lies beyond it.
    fn earliest_wall_clock(&self, instant: Timestamp) -> Option<DateTime> {
        let (before, after) = (instant.checked_sub(FURTHEST_SHIFT).ok()?, instant.checked_add(FURTHEST_SHIFT).ok()?);
        [before, instant, after].map(|at| self.zone.to_offset(at).to_datetime(instant)).into_iter().min()
    }

    fn matches_month(&self, day: Date) -> bool {
        self.pattern.month_match(day.month() as u32).unwrap_or(false)
    }

    fn matches_day(&self, day: Date) -> bool {
        let weekday = Weekday::from_days_from_sunday(day.weekday().to_sunday_zero_offset() as u32);
        self.pattern.day_match(i32::from(day.year()), day.month() as u32, day.day() as u32, weekday).unwrap_or(false)
    }

    /// When the wall clock's minute fires, and when again.
    fn instants(&self, minute: DateTime) -> (Option<i64>, Option<i64>) {
        let real_time = self.hours.len() == 24;
        let at = |offset: jiff::tz::Offset| offset.to_timestamp(minute).ok();
        let second = |instant: Timestamp| instant.as_second();
        match self.zone.to_ambiguous_timestamp(minute).offset() {
            AmbiguousOffset::Unambiguous { offset } => (at(offset).map(second), None),
            AmbiguousOffset::Fold { before, after } => (at(before).map(second), at(after).map(second).filter(|_| real_time)),
            AmbiguousOffset::Gap { .. } if real_time => (None, None),
            // By the offset before it, a minute within the gap lies at or after the moment the clock was set.
            AmbiguousOffset::Gap { before, .. } => {
                let beyond = at(before).and_then(|instant| instant.checked_add(SignedDuration::from_secs(1)).ok());
                (beyond.and_then(|beyond| self.zone.preceding(beyond).next()).map(|set| second(set.timestamp())), None)
            }
        }
    }
}

fn find_zone(name: &str) -> Result<TimeZone, Fault> {
    // Not what jiff makes of a machine without a zone.
    match TimeZone::get(name) {
        Ok(zone) if zone.iana_name().is_some_and(|name| name != "Etc/Unknown") => Ok(zone),
        _ => {
            let known: Vec<String> = jiff::tz::db().available().map(|zone| zone.as_str().to_string()).collect();
            Err(Fault::Zone(crate::names::nearest(name, known.iter().map(String::as_str)).map(str::to_string)))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
