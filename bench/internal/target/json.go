package target

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
	"github.com/dualcheck/dualcheck/bench/internal/rig"
)

// jsonClient is a call by HTTP, as a program without gRPC makes it.
type jsonClient struct {
	http *http.Client
	base string
}

var fingerprintText = base64.StdEncoding.EncodeToString(fingerprint)

func newJSON(n rig.Node, s Spec) (caller, error) {
	if n.HTTP == "" {
		return nil, errors.New("the JSON port of a node that is there already is not known: leave --addr out")
	}
	conns := max(s.InFlight, 1)
	return jsonClient{&http.Client{Transport: &http.Transport{MaxIdleConns: conns, MaxIdleConnsPerHost: conns}}, "http://" + n.HTTP + "/v1/dedup:"}, nil
}

// jsonAnswer is as much of an answer as is looked at.
type jsonAnswer struct {
	Verdict string `json:"verdict"`
	Claim   struct {
		Token string `json:"token"`
	} `json:"claim"`
	Record struct {
		Result struct {
			Body string `json:"body"`
		} `json:"result"`
	} `json:"record"`
}

func (c jsonClient) begin(ctx context.Context, key string) (answer, error) {
	var a jsonAnswer
	if err := c.post(ctx, "begin", &a, `{"namespace":"`+namespace+`","key":"`+key+`","operation":"`+operation+
		`","fingerprint":"`+fingerprintText+`","requestId":"`+key+`","owner":"`+owner+`"}`); err != nil {
		return answer{}, err
	}
	size := base64.StdEncoding.DecodedLen(len(a.Record.Result.Body)) - (len(a.Record.Result.Body) - len(strings.TrimRight(a.Record.Result.Body, "=")))
	return answer{dualcheckv1.Verdict(dualcheckv1.Verdict_value[a.Verdict]), a.Claim.Token, size}, nil
}

func (c jsonClient) complete(ctx context.Context, key, token string, body []byte) error {
	return c.post(ctx, "complete", &struct{}{}, `{"namespace":"`+namespace+`","key":"`+key+`","token":"`+token+
		`","result":{"code":200,"contentType":"`+contentType+`","body":"`+base64.StdEncoding.EncodeToString(body)+`"}}`)
}

func (c jsonClient) post(ctx context.Context, method string, into any, body string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+method, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, bytes.TrimSpace(text))
	}
	return json.Unmarshal(text, into)
}

func (c jsonClient) Close() error {
	c.http.CloseIdleConnections()
	return nil
}
