//! Sums by minute, hour, day and month, and which of them make up a span of time. Instants are microseconds since 2000-01-01 UTC, as PostgreSQL counts;
//! `i64::MIN` and `i64::MAX` are its infinities.

/// Microseconds in a minute, an hour and a day.
const MINUTE: i64 = 60_000_000;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;

/// How long minutes are kept once hours have them, and hours once days have them.
const KEEP_MINUTES: i64 = 3 * DAY;
const KEEP_HOURS: i64 = 100 * DAY;

/// The size of the spans that sums are kept by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Where everything goes first.
    Minute = 1,
    /// Sums of minutes.
    Hour = 2,
    /// Sums of hours: days in UTC.
    Day = 3,
    /// Sums of days: months in UTC.
    Month = 4,
}

impl Level {
    /// The next coarser level.
    pub fn coarser(self) -> Option<Self> {
        match self {
            Level::Minute => Some(Level::Hour),
            Level::Hour => Some(Level::Day),
            Level::Day => Some(Level::Month),
            Level::Month => None,
        }
    }

    /// The start of the span that holds an instant.
    pub fn floor(self, at: i64) -> i64 {
        if at == i64::MIN || at == i64::MAX {
            return at;
        }
        match self {
            Level::Minute => at.div_euclid(MINUTE).saturating_mul(MINUTE),
            Level::Hour => at.div_euclid(HOUR).saturating_mul(HOUR),
            Level::Day => at.div_euclid(DAY).saturating_mul(DAY),
            Level::Month => month_start(month_of(at.div_euclid(DAY))),
        }
    }

    /// The first start of a span that is not before an instant.
    pub fn ceil(self, at: i64) -> i64 {
        let floor = self.floor(at);
        if floor == at {
            return at;
        }
        match self {
            Level::Minute => floor.saturating_add(MINUTE),
            Level::Hour => floor.saturating_add(HOUR),
            Level::Day => floor.saturating_add(DAY),
            Level::Month => month_start(month_of(at.div_euclid(DAY)) + 1),
        }
    }
}

/// Months since January 2000 of a day counted from 2000-01-01.
fn month_of(day: i64) -> i64 {
    // No month is longer than 31 days or shorter than 28: a lower bound, from which it rises.
    let mut month = day.div_euclid(31).min(day.div_euclid(28));
    while first_day(month + 1) <= day {
        month += (day - first_day(month + 1)).div_euclid(31) + 1;
    }
    month
}

/// The first day of a month, both counted from January 2000: years of 365 days and their leap days, then the months before it.
fn first_day(month: i64) -> i64 {
    const BEFORE: [i64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let (year, month) = (month.div_euclid(12), month.rem_euclid(12));
    let leap_days = (year + 3).div_euclid(4) - (year + 99).div_euclid(100) + (year + 399).div_euclid(400);
    let leap = year.rem_euclid(4) == 0 && (year.rem_euclid(100) != 0 || year.rem_euclid(400) == 0);
    year * 365 + leap_days + BEFORE[month as usize] + i64::from(leap && month > 1)
}

fn month_start(month: i64) -> i64 {
    first_day(month).saturating_mul(DAY)
}

/// Up to where each level has everything, and since when the finer ones still have it. Everything goes to minutes first; a coarser level has what lies before
/// its mark, and what comes late for it is added to it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// Before it, hours are complete.
    pub hours_until: i64,
    /// Before it, days are complete.
    pub days_until: i64,
    /// Before it, months are complete.
    pub months_until: i64,
    /// From it on minutes are kept.
    pub minutes_from: i64,
    /// From it on hours are kept.
    pub hours_from: i64,
}

impl Marks {
    /// Marks where nothing was rolled up yet: only minutes.
    pub const NONE: Marks =
        Marks { hours_until: i64::MIN, days_until: i64::MIN, months_until: i64::MIN, minutes_from: i64::MIN, hours_from: i64::MIN };

    /// The marks to begin with, and to come to.
    pub fn at(now: i64) -> Marks {
        Marks {
            hours_until: Level::Hour.floor(now),
            days_until: Level::Day.floor(now),
            months_until: Level::Month.floor(now),
            minutes_from: Level::Hour.floor(now.saturating_sub(KEEP_MINUTES)),
            hours_from: Level::Day.floor(now.saturating_sub(KEEP_HOURS)),
        }
    }

    /// Up to where a level has everything.
    pub fn until(&self, level: Level) -> i64 {
        match level {
            Level::Minute => i64::MAX,
            Level::Hour => self.hours_until,
            Level::Day => self.days_until,
            Level::Month => self.months_until,
        }
    }

    /// A level has everything up to an instant now.
    pub fn reached(&mut self, level: Level, until: i64) {
        match level {
            Level::Minute => {}
            Level::Hour => self.hours_until = until,
            Level::Day => self.days_until = until,
            Level::Month => self.months_until = until,
        }
    }

    /// Since when a level is kept.
    pub fn kept_from(&self, level: Level) -> i64 {
        match level {
            Level::Minute => self.minutes_from,
            Level::Hour => self.hours_from,
            Level::Day | Level::Month => i64::MIN,
        }
    }

    /// A level is kept from an instant on only.
    pub fn keep_from(&mut self, level: Level, from: i64) {
        match level {
            Level::Minute => self.minutes_from = from,
            Level::Hour => self.hours_from = from,
            Level::Day | Level::Month => {}
        }
    }

    /// A span of time widened to what can be told apart: to whole minutes; where those are gone, to whole hours; where those are gone, to whole days.
    pub fn widen(&self, since: i64, until: i64) -> (i64, i64) {
        let level = |at: i64| {
            if at < self.hours_from {
                Level::Day
            } else if at < self.minutes_from {
                Level::Hour
            } else {
                Level::Minute
            }
        };
        (level(Level::Minute.floor(since)).floor(since), level(Level::Minute.ceil(until)).ceil(until))
    }

    /// The spans that make up a widened span of time, none of them coarser than `coarsest` while there is a finer one.
    pub fn cover(&self, since: i64, until: i64, coarsest: Level) -> Vec<Span> {
        let mut spans = Vec::new();
        // Where hours are gone, days must do.
        let gone = if coarsest < Level::Day { until.min(self.hours_from) } else { since };
        self.add(&mut spans, Level::Minute, since, gone, Level::Day);
        self.add(&mut spans, Level::Minute, since.max(gone), until, coarsest);
        spans
    }

    fn add(&self, spans: &mut Vec<Span>, level: Level, since: i64, until: i64, coarsest: Level) {
        if since >= until {
            return;
        }
        if let Some(next) = level.coarser().filter(|next| *next <= coarsest) {
            let (inner, outer) = (next.ceil(since), next.floor(until.min(self.until(next))));
            if inner < outer {
                self.add(spans, level, since, inner, coarsest);
                self.add(spans, next, inner, outer, coarsest);
                self.add(spans, level, outer, until, coarsest);
                return;
            }
        }
        spans.push(Span { level, since, until });
    }
}

/// Sums of one level that start at or after `since` and before `until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The level.
    pub level: Level,
    /// From here.
    pub since: i64,
    /// To here.
    pub until: i64,
}

/// A number for a database of a cluster: transaction ids mean something only in the one they were given out in.
pub fn incarnation(system: u64, database: u32) -> i32 {
    let mut mixed = system ^ u64::from(database).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) as u32 as i32
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn months_are_those_of_the_calendar() {
        let date = |year, month, day| jiff::civil::date(year, month, day).since(jiff::civil::date(2000, 1, 1)).unwrap().get_days();
        for year in -400i16..3000 {
            for month in 1..=12i8 {
                let number = (i64::from(year) - 2000) * 12 + i64::from(month) - 1;
                let first = i64::from(date(year, month, 1));
                assert_eq!(first_day(number), first, "{year}-{month}");
                assert_eq!((month_of(first), month_of(first - 1), month_of(first + 27)), (number, number - 1, number));
            }
        }
    }

    #[test]
    fn infinities_and_the_ends_of_time_are_taken() {
        let marks = Marks::at(5 * DAY);
        for (since, until) in
            [(i64::MIN, i64::MAX), (i64::MIN + 1, i64::MAX - 1), (i64::MAX, i64::MIN), (-211_813_488_000_000_000, 9_223_371_331_199_999_999)]
        {
            let (since, until) = marks.widen(since, until);
            marks.cover(since, until, Level::Month);
        }
        assert_eq!(marks.widen(i64::MIN, i64::MAX), (i64::MIN, i64::MAX));
    }

    fn when() -> impl Strategy<Value = i64> {
        prop_oneof![Just(i64::MIN), Just(i64::MAX), -400 * DAY..40 * DAY, (-400 * 24..40 * 24i64).prop_map(|hour| hour * HOUR)]
    }

    fn marks() -> impl Strategy<Value = Marks> {
        (-30 * DAY..30 * DAY, 0..50i64, 0..10i64, 0..3i64).prop_map(|(now, hours, days, months)| {
            let to = Marks::at(now);
            Marks {
                hours_until: (to.hours_until - hours * HOUR).max(to.minutes_from),
                days_until: (to.days_until - days * DAY).max(to.hours_from),
                months_until: Level::Month.floor(to.months_until - months * 31 * DAY),
                ..to
            }
        })
    }

    proptest! {
        #[test]
        fn spans_join_without_gap_or_overlap_and_only_of_what_there_is(
            marks in prop_oneof![Just(Marks::NONE), marks()], since in when(), until in when(), coarsest in 1..=4i32,
        ) {
            let coarsest = [Level::Minute, Level::Hour, Level::Day, Level::Month][(coarsest - 1) as usize];
            let (from, to) = marks.widen(since, until);
            prop_assert!(from <= since && to >= until);
            let spans = marks.cover(from, to, coarsest);
            let mut at = from;
            for span in &spans {
                prop_assert_eq!(span.since, at);
                prop_assert!(span.until > span.since);
                prop_assert_eq!(span.level.floor(span.since), span.since);
                prop_assert!(span.level.floor(span.until) == span.until);
                prop_assert!(span.until <= marks.until(span.level));
                match span.level {
                    Level::Minute => prop_assert!(span.since >= marks.minutes_from || coarsest == Level::Minute),
                    Level::Hour => prop_assert!(span.since >= marks.hours_from),
                    Level::Day | Level::Month => {}
                }
                at = span.until;
            }
            prop_assert_eq!(at, if from < to { to } else { from });
        }

        #[test]
        fn the_finest_that_is_kept_tells_the_edges(since in -40 * DAY..0i64) {
            let marks = Marks::at(0);
            let (from, _) = marks.widen(since, 0);
            let finest = if since >= marks.minutes_from { MINUTE } else { HOUR };
            prop_assert!(since - from < finest);
        }
    }

    #[test]
    fn a_long_span_is_made_of_few() {
        let marks = Marks::at(200 * DAY + 5 * HOUR + 7 * MINUTE);
        let (since, until) = marks.widen(10 * DAY + 1, i64::MAX);
        assert!(marks.cover(since, until, Level::Month).len() <= 7);
    }

    #[test]
    fn databases_differ() {
        let all: std::collections::HashSet<i32> =
            (0..1000u32).flat_map(|database| [1u64, 2, 7 << 40].map(|system| incarnation(system, database))).collect();
        assert_eq!(all.len(), 3000);
    }
}
